"""``python -m deepnvme.report``: as ``ds_report``."""

from . import main

if __name__ == "__main__":
    main()
