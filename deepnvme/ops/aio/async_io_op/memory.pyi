"""Copies between ranges of host memory, and checksums of it; ``csrc/bindings/memory_binding.cpp``."""

from typing_extensions import Buffer

def copy_many(destinations: Buffer, sources: Buffer, lengths: Buffer) -> None:
    """See :func:`deepnvme.memory.tensor_bytes.copy_many`. Accepts any contiguous buffers of uint64."""

def crc32(data: Buffer, crc: int = 0, tables: bool = False) -> int:
    """Return the result of ``zlib.crc32``, at the speed of memory and without the GIL. From 16 MiB on, uses up to 4 threads.

    Args:
        data: Contiguous bytes of one dimension.
        crc: The CRC-32 of the preceding bytes; 0 for none.
        tables: Do without the processor's instructions for it: for tests.
    """

def crc32_combined(first: int, second: int, nbytes: int) -> int:
    """Return the CRC-32 of two consecutive ranges from that of each. ``nbytes``: bytes of the second range."""

def crc32_mismatches(addresses: Buffer, lengths: Buffer, expected: Buffer) -> list[int]:
    """See :func:`deepnvme.memory.tensor_bytes.crc32_mismatches`. Accepts any contiguous buffers of uint64."""

def crc32_method() -> str:
    """Return how this processor computes CRC-32: "vpclmulqdq", "pclmulqdq", "crc32 instructions" or "tables"."""
