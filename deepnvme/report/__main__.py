"""Entry point of ``python -m deepnvme.report``, the same as ``ds_report``."""

from . import main

if __name__ == "__main__":
    main()
