"""Tensor I/O at the speed of the drive; compatible with DeepSpeed's DeepNVMe."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._lazy import from_modules
from .engine import Engine, File, Future, Stats
from .version import __version__

if TYPE_CHECKING:
    from . import checkpoint as checkpoint
    from . import data as data
    from . import integrations as integrations
    from . import io as io
    from . import kvstore as kvstore
    from . import memory as memory
    from . import nn as nn
    from . import offload as offload
    from . import ops as ops
    from . import profiles as profiles
    from . import quantization as quantization
    from . import report as report
    from . import safetensors as safetensors
    from . import streaming as streaming
    from . import swap as swap
    from . import tables as tables
    from . import tune as tune
    from .checkpoint import CheckpointManager, NVMeReader, NVMeWriter, SaveFuture, async_save, load, save
    from .drives.aio_config import AioConfig
    from .drives.profiles import engine_for
    from .offload import OffloadedOptimizer, OffloadedTraining, save_on_disk
    from .tables import Table

__all__ = [
    "AioConfig",
    "CheckpointManager",
    "Engine",
    "File",
    "Future",
    "NVMeReader",
    "NVMeWriter",
    "OffloadedOptimizer",
    "OffloadedTraining",
    "SaveFuture",
    "Stats",
    "Table",
    "__version__",
    "async_save",
    "engine_for",
    "load",
    "save",
    "save_on_disk",
]

_CHECKPOINT = ("CheckpointManager", "NVMeReader", "NVMeWriter", "SaveFuture", "async_save", "load", "save")
_LATER = {
    "AioConfig": "drives.aio_config",
    "OffloadedOptimizer": "offload",
    "OffloadedTraining": "offload",
    "Table": "tables",
    "engine_for": "drives.profiles",
    "save_on_disk": "offload",
    **dict.fromkeys(_CHECKPOINT, "checkpoint"),
}
"""Names imported on first use, each with its submodule: they need torch, or pydantic, which takes a tenth of a second."""

_PACKAGES = (
    "checkpoint", "data", "integrations", "io", "kvstore", "memory", "nn", "offload", "ops", "profiles", "quantization",
    "report", "safetensors", "streaming", "swap", "tables", "tune",
)  # fmt: skip
"""Submodules that are imported on first use, so that ``deepnvme.checkpoint.verify`` works after ``import deepnvme``."""

if not TYPE_CHECKING:
    __getattr__, __dir__ = from_modules(__name__, _LATER, _PACKAGES)
