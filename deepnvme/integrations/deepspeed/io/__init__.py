"""DeepSpeed's ``FastFileWriter`` (``deepspeed.io`` of 0.19): a file object for ``torch.save`` and other writers of files."""

from __future__ import annotations

from deepnvme._lazy import public_names

from .fast_file_writer import FastFileWriter, FastFileWriterConfig

__all__ = ["FastFileWriter", "FastFileWriterConfig"]

__dir__ = public_names(__name__)
