"""DeepSpeed's file writers (``deepspeed.io`` of 0.19): file objects for ``torch.save`` and other writers of files."""

from __future__ import annotations

from deepnvme._lazy import public_names

from .fast_file_writer import FastFileWriter, FastFileWriterConfig
from .file_writers import BaseFileWriter, MockFileWriter, PyFileWriter

__all__ = ["BaseFileWriter", "FastFileWriter", "FastFileWriterConfig", "MockFileWriter", "PyFileWriter"]

__dir__ = public_names(__name__)
