"""Tensor I/O at the speed of the drive; compatible with DeepSpeed's DeepNVMe."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._lazy import from_modules
from .engine import Engine, File, Future, Stats
from .version import __version__

if TYPE_CHECKING:
    from .checkpoint import CheckpointManager, NVMeReader, NVMeWriter, SaveFuture, async_save, load, save
    from .config import AioConfig
    from .offload import OffloadedOptimizer, save_on_disk
    from .profiles import engine_for

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
    "engine_for",
    "load",
    "save",
    "save_on_disk",
]

_CHECKPOINT = ("CheckpointManager", "NVMeReader", "NVMeWriter", "SaveFuture", "async_save", "load", "save")
_LATER = {
    "AioConfig": "config",
    "OffloadedOptimizer": "offload",
    "engine_for": "profiles",
    "save_on_disk": "offload",
    **dict.fromkeys(_CHECKPOINT, "checkpoint"),
}
"""Names imported on first use, each with its submodule: they need torch, or pydantic, which takes a tenth of a second."""

_PACKAGES = frozenset(
    ("checkpoint", "io", "memory", "nn", "offload", "ops", "profiles", "safetensors", "store", "streaming", "swap", "tables")
)
"""Submodules that are imported on first use, so that ``deepnvme.checkpoint.verify`` works after ``import deepnvme``."""

__getattr__, __dir__ = from_modules(__name__, _LATER, _PACKAGES)
