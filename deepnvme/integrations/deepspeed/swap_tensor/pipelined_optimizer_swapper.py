"""The optimizer swapper that DeepSpeed uses with ``pipeline_read`` or ``pipeline_write``."""

from __future__ import annotations

from typing import Any

from .optimizer_swapper import OptimizerSwapper


class PipelinedOptimizerSwapper(OptimizerSwapper):
    """An :class:`OptimizerSwapper` under DeepSpeed's name. Reading and writing both overlap the step, with either option.

    Contract: DeepSpeed 0.19, ``runtime/swap_tensor/pipelined_optimizer_swapper.py``.
    """

    def __init__(self, swap_config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(swap_config, *args, **kwargs)
        self.async_swap_in: bool = swap_config.pipeline_read
        self.async_swap_out: bool = swap_config.pipeline_write
