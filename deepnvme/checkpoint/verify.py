"""``python -m deepnvme.checkpoint.verify FILE...``, as ``deepnvme verify``. What is imported is the function of that name."""

from .verifying import main

if __name__ == "__main__":
    main()
