"""Run ``python -m deepnvme.checkpoint.verify FILE...``, which is ``deepnvme verify``.

``from deepnvme.checkpoint import verify`` gives the function, also after this module was imported.
"""

import sys

from .verification import main, verify

if __name__ == "__main__":
    main()
else:  # importing this module would replace the package's attribute ``verify``, the function, by the module
    sys.modules[__name__] = verify  # type: ignore[assignment]
