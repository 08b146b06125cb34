"""``python -m deepnvme.checkpoint.verify FILE...``, as ``deepnvme verify``. What is imported is the function of that name."""

import sys

from .verifying import main, verify

if __name__ == "__main__":
    main()
else:  # an import makes what it finds here an attribute of the package, where the function is to stay
    sys.modules[__name__] = verify  # type: ignore[assignment]
