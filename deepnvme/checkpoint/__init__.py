"""Checkpoints: ordinary files, written and read at the speed of the drive."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepnvme._lazy import from_modules

from .background import SaveFuture, async_save
from .contents import CorruptCheckpoint
from .engine import NVMeCheckpointEngine
from .loading import load
from .manager import CheckpointManager
from .saving import save
from .verifying import Report, verify

if TYPE_CHECKING:
    from .dcp_huggingface import NVMeHuggingFaceReader, NVMeHuggingFaceWriter
    from .dcp_reader import NVMeReader
    from .dcp_writer import NVMeWriter

__all__ = [
    "CheckpointManager",
    "CorruptCheckpoint",
    "NVMeCheckpointEngine",
    "NVMeHuggingFaceReader",
    "NVMeHuggingFaceWriter",
    "NVMeReader",
    "NVMeWriter",
    "Report",
    "SaveFuture",
    "async_save",
    "load",
    "save",
    "verify",
]

_WITH_DISTRIBUTED = {
    "NVMeHuggingFaceReader": "dcp_huggingface",
    "NVMeHuggingFaceWriter": "dcp_huggingface",
    "NVMeReader": "dcp_reader",
    "NVMeWriter": "dcp_writer",
}
"""What imports torch.distributed.checkpoint, half a second that the others do without, and where it is."""

__getattr__ = from_modules(__name__, _WITH_DISTRIBUTED)
