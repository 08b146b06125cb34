"""Entry point of ``python -m deepnvme.tune.sweep``, the same as ``ds_nvme_tune``."""

from deepnvme.tools.tune.ds_nvme_tune import main

if __name__ == "__main__":
    main()
