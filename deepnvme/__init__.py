"""Tensor I/O at the speed of the drive; compatible with DeepSpeed's DeepNVMe."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .config import AioConfig
from .engine import Engine, File, Future, Stats
from .version import __version__

if TYPE_CHECKING:
    from .swap.optimizer import OffloadedOptimizer

__all__ = ["AioConfig", "Engine", "File", "Future", "OffloadedOptimizer", "Stats", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "OffloadedOptimizer":  # imports torch, which the others do without
        from .swap.optimizer import OffloadedOptimizer

        return OffloadedOptimizer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
