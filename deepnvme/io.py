"""Public name of DeepSpeed's file writer, which is in :mod:`deepnvme.integrations.deepspeed.io`."""

from deepnvme.integrations.deepspeed.io import FastFileWriter, FastFileWriterConfig

__all__ = ["FastFileWriter", "FastFileWriterConfig"]
