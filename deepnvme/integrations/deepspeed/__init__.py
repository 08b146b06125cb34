"""Run DeepSpeed's ZeRO offload and checkpoints on this package's ops, without changing DeepSpeed's JSON configuration.

    import deepnvme.integrations.deepspeed as d
    d.enable()                                  # the ops
    d.enable(swappers=True, checkpoint=True)    # also ZeRO stage 3's swapper classes, and the fast checkpoint writer

To leave the program unchanged, too: ``python -m deepnvme.integrations.deepspeed --swappers train.py ...``. DeepSpeed is imported
by :func:`enable`, not by this module.
"""

from .enabling import disable, enable

__all__ = ["disable", "enable"]
