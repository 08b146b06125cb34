"""Entry point of ``python -m deepnvme.integrations.deepspeed [--swappers] [--checkpoint] [-m] SCRIPT``: see :mod:`.launching`."""

from .launching import main

main()
