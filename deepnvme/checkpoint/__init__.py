"""Checkpoints: ordinary files, written and read at the speed of the drive."""

from __future__ import annotations

from .contents import CorruptCheckpoint
from .loading import load
from .saving import save

__all__ = ["CorruptCheckpoint", "load", "save"]
