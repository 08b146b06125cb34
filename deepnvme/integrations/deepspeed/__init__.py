"""Run DeepSpeed's ZeRO offload and checkpoints on this package's ops, without changing DeepSpeed's JSON configuration.

    import deepnvme.integrations.deepspeed as d
    d.enable()                                  # the ops
    d.enable(swappers=True, checkpoint=True)    # also ZeRO stage 3's swapper classes, and the fast checkpoint writer

To leave the program unchanged, too: ``python -m deepnvme.integrations.deepspeed --swappers train.py ...``. DeepSpeed is imported
by :func:`enable`, not by this module.
"""

from typing import TYPE_CHECKING

from deepnvme._lazy import from_modules

if TYPE_CHECKING:
    from .enabling import disable, enable

__all__ = ["disable", "enable"]

if not TYPE_CHECKING:
    __getattr__, __dir__ = from_modules(__name__, dict.fromkeys(__all__, "enabling"))  # which imports torch
