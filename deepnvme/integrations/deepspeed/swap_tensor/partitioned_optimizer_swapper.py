"""The optimizer swapper that DeepSpeed uses without ``pipeline_read`` and ``pipeline_write``."""

from __future__ import annotations

from .optimizer_swapper import OptimizerSwapper


class PartitionedOptimizerSwapper(OptimizerSwapper):
    """An :class:`OptimizerSwapper` under DeepSpeed's name. Reading and writing overlap the step here, too, if buffers are free.

    Compared with DeepSpeed's class, that changes only how long a step takes.

    Contract: DeepSpeed 0.19, ``runtime/swap_tensor/partitioned_optimizer_swapper.py``.
    """

    SWAP_IN_TIMER = "swap_in_param"
    SWAP_OUT_TIMER = "swap_out_param"
