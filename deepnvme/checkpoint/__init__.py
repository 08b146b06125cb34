"""Files that torch writes and reads, at the speed of the drive."""

from .fast_file_writer import FastFileWriter, FastFileWriterConfig

__all__ = ["FastFileWriter", "FastFileWriterConfig"]
