"""The optimizer swapper that DeepSpeed takes with ``pipeline_read`` or ``pipeline_write``."""

from __future__ import annotations

from typing import Any

from .optimizer_swapper import OptimizerSwapper


class PipelinedOptimizerSwapper(OptimizerSwapper):
    """As :class:`OptimizerSwapper` says. Reading and writing both overlap the step, whichever of the two was asked for.

    Contract: DeepSpeed 0.19, ``runtime/swap_tensor/pipelined_optimizer_swapper.py``.
    """

    def __init__(self, swap_config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(swap_config, *args, **kwargs)
        self.async_swap_in: bool = swap_config.pipeline_read
        self.async_swap_out: bool = swap_config.pipeline_write
