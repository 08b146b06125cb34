"""Run ``python -m deepnvme.checkpoint.verify FILE...``, which is ``deepnvme verify``. Importing this gives the function
``verify``."""

import sys

from .verifying import main, verify

if __name__ == "__main__":
    main()
else:  # importing this module would replace the package's attribute ``verify``, the function, by the module
    sys.modules[__name__] = verify  # type: ignore[assignment]
