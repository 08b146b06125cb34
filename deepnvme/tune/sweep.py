"""``python -m deepnvme.tune.sweep``: as ``ds_nvme_tune``."""

from deepnvme.tools.tune.cli.sweep import main

if __name__ == "__main__":
    main()
