"""Public name of DeepSpeed's file writers, which are in :mod:`deepnvme.integrations.deepspeed.io`."""

from deepnvme._lazy import public_names
from deepnvme.integrations.deepspeed.io import BaseFileWriter, FastFileWriter, FastFileWriterConfig, MockFileWriter, PyFileWriter

__all__ = ["BaseFileWriter", "FastFileWriter", "FastFileWriterConfig", "MockFileWriter", "PyFileWriter"]

__dir__ = public_names(__name__)
