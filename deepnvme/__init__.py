"""Tensor I/O at the speed of the drive; compatible with DeepSpeed's DeepNVMe."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .config import AioConfig
from .engine import Engine, File, Future, Stats
from .version import __version__

if TYPE_CHECKING:
    from .checkpoint import CheckpointManager, NVMeReader, NVMeWriter, SaveFuture, async_save, load, save
    from .swap.optimizer import OffloadedOptimizer

__all__ = [
    "AioConfig",
    "CheckpointManager",
    "Engine",
    "File",
    "Future",
    "NVMeReader",
    "NVMeWriter",
    "OffloadedOptimizer",
    "SaveFuture",
    "Stats",
    "__version__",
    "async_save",
    "load",
    "save",
]

_WITH_TORCH = {
    "CheckpointManager": "checkpoint",
    "NVMeReader": "checkpoint",
    "NVMeWriter": "checkpoint",
    "OffloadedOptimizer": "swap.optimizer",
    "SaveFuture": "checkpoint",
    "async_save": "checkpoint",
    "load": "checkpoint",
    "save": "checkpoint",
}
"""What imports torch, which the others do without, and where it is."""


_PACKAGES = frozenset(("checkpoint", "io", "ops", "safetensors", "swap"))
"""Imported when they are first named, as ``deepnvme.checkpoint.verify`` is in the documentation."""


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return importlib.import_module(f".{name}", __name__)
    if name not in _WITH_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_WITH_TORCH[name]}", __name__), name)
