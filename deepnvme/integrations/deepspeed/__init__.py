"""DeepSpeed's ZeRO and checkpoints on this package's ops, with no change of the JSON.

    import deepnvme.integrations.deepspeed as d
    d.enable()                                  # the ops
    d.enable(swappers=True, checkpoint=True)    # and ZeRO stage 3's swapper classes, and the fast checkpoint writer

Or, with no change of the program: ``python -m deepnvme.integrations.deepspeed --swappers train.py ...``. DeepSpeed is imported by
:func:`enable` and not before.
"""

from .enabling import disable, enable

__all__ = ["disable", "enable"]
