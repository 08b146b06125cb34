"""Public name of DeepSpeed's file writer, which is in :mod:`deepnvme.integrations.deepspeed.io`."""

from deepnvme._lazy import public_names
from deepnvme.integrations.deepspeed.io import FastFileWriter, FastFileWriterConfig

__all__ = ["FastFileWriter", "FastFileWriterConfig"]

__dir__ = public_names(__name__)
