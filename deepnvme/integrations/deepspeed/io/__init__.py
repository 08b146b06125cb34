"""DeepSpeed's file writers (``deepspeed.io`` of 0.19): file objects for ``torch.save`` and other writers of files."""

from __future__ import annotations

from .base_file_writer import BaseFileWriter
from .fast_file_writer import FastFileWriter, FastFileWriterConfig
from .mock_file_writer import MockFileWriter
from .py_file_writer import PyFileWriter

__all__ = ["BaseFileWriter", "FastFileWriter", "FastFileWriterConfig", "MockFileWriter", "PyFileWriter"]
