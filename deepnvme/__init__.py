"""Tensor I/O at the speed of the drive; compatible with DeepSpeed's DeepNVMe."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._lazy import from_modules
from .config import AioConfig
from .engine import Engine, File, Future, Stats
from .version import __version__

if TYPE_CHECKING:
    from .checkpoint import CheckpointManager, NVMeReader, NVMeWriter, SaveFuture, async_save, load, save
    from .offload import OffloadedOptimizer

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
    "OffloadedOptimizer": "offload",
    "SaveFuture": "checkpoint",
    "async_save": "checkpoint",
    "load": "checkpoint",
    "save": "checkpoint",
}
"""What imports torch, which the others do without, and where it is."""

_PACKAGES = frozenset(("checkpoint", "io", "memory", "offload", "ops", "safetensors", "store", "streaming", "swap"))
"""Imported when they are first named, as ``deepnvme.checkpoint.verify`` is in the documentation."""

__getattr__ = from_modules(__name__, _WITH_TORCH, _PACKAGES)
