"""Checkpoints as ordinary files (.pt, safetensors, torch.distributed.checkpoint), written and read at the speed of the drive."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepnvme._lazy import from_modules

from .background import SaveFuture, async_save
from .formats.pt_records import CorruptCheckpoint
from .loading import load
from .manager import CheckpointManager
from .saving import save
from .verification import Report, verify

if TYPE_CHECKING:
    from deepnvme.integrations.deepspeed.checkpoint_engine import NVMeCheckpointEngine

    from .dcp.reader import NVMeReader
    from .dcp.writer import NVMeWriter

__all__ = [
    "CheckpointManager",
    "CorruptCheckpoint",
    "NVMeCheckpointEngine",
    "NVMeReader",
    "NVMeWriter",
    "Report",
    "SaveFuture",
    "async_save",
    "load",
    "save",
    "verify",
]

_LATER = {
    "NVMeCheckpointEngine": "deepnvme.integrations.deepspeed.checkpoint_engine",
    "NVMeReader": "dcp.reader",
    "NVMeWriter": "dcp.writer",
}
"""Names imported on first use, because their modules import this package or ``torch.distributed.checkpoint`` (half a second)."""

if not TYPE_CHECKING:
    __getattr__, __dir__ = from_modules(__name__, _LATER)
