"""Copies between ranges of host memory, and checksums of it; ``csrc/bindings/memory_binding.cpp``."""

from typing_extensions import Buffer

def copy_many(destinations: Buffer, sources: Buffer, lengths: Buffer) -> None:
    """What :func:`deepnvme.memory.tensor_bytes.copy_many` documents. Any contiguous buffers of uint64 serve."""

def crc32(data: Buffer, crc: int = 0, tables: bool = False) -> int:
    """What ``zlib.crc32`` returns, at the speed of memory, without the GIL, and from 16 MiB on by up to 4 threads.

    Args:
        data: Contiguous bytes of one dimension.
        crc: The CRC-32 of the preceding bytes; 0 for none.
        tables: Do without the processor's instructions for it: for tests.
    """

def crc32_combined(first: int, second: int, nbytes: int) -> int:
    """The CRC-32 of two ranges in a row: ``first`` of the one, ``second`` of the other, which has ``nbytes`` bytes."""

def crc32_method() -> str:
    """How this processor computes it: "pclmulqdq", "crc32 instructions" or "tables"."""
