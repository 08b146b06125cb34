"""Entry point of ``python -m deepnvme.tune.io``, the same as ``ds_io``."""

from deepnvme.tools.tune.ds_io import main

if __name__ == "__main__":
    main()
