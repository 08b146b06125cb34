"""The optimizer swapper that DeepSpeed takes without ``pipeline_read`` and ``pipeline_write``."""

from __future__ import annotations

from .optimizer_swapper import OptimizerSwapper


class PartitionedOptimizerSwapper(OptimizerSwapper):
    """As :class:`OptimizerSwapper` says. What idle buffers allow to overlap, overlaps here too: nobody can tell but by the clock.

    Contract: DeepSpeed 0.19, ``runtime/swap_tensor/partitioned_optimizer_swapper.py``.
    """

    SWAP_IN_TIMER = "swap_in_param"
    SWAP_OUT_TIMER = "swap_out_param"
