"""Copies between ranges of host memory; ``csrc/bindings/memory_binding.cpp``."""

from typing_extensions import Buffer

def copy_many(destinations: Buffer, sources: Buffer, lengths: Buffer) -> None:
    """What :func:`deepnvme.memory.tensor_bytes.copy_many` documents. Any contiguous buffers of uint64 serve."""
