"""Checkpoints: ordinary files, written and read at the speed of the drive."""

from __future__ import annotations

from .contents import CorruptCheckpoint
from .fast_file_writer import FastFileWriter, FastFileWriterConfig
from .loading import load
from .saving import save
from .verifying import Report, verify

__all__ = ["CorruptCheckpoint", "FastFileWriter", "FastFileWriterConfig", "Report", "load", "save", "verify"]
