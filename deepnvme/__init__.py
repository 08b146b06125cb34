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
"""Names that need torch, each with its submodule. They are imported on first use, so that the rest works without torch."""

_PACKAGES = frozenset(("checkpoint", "io", "memory", "offload", "ops", "safetensors", "store", "streaming", "swap"))
"""Submodules that are imported on first use, so that ``deepnvme.checkpoint.verify`` works after ``import deepnvme``."""

__getattr__ = from_modules(__name__, _WITH_TORCH, _PACKAGES)
