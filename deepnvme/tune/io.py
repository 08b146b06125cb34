"""``python -m deepnvme.tune.io``: as ``ds_io``."""

from .cli.io import main

if __name__ == "__main__":
    main()
