"""DeepSpeed's ``FastFileWriter`` (``deepspeed.io`` of 0.19): a file object for ``torch.save`` and other writers of files."""

from __future__ import annotations

from .fast_file_writer import FastFileWriter, FastFileWriterConfig

__all__ = ["FastFileWriter", "FastFileWriterConfig"]
