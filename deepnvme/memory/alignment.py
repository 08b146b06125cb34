"""The unit that direct I/O goes by, and rounding up to it."""

from __future__ import annotations

import mmap

PAGE = 4096
"""Bytes: no drive asks more of offsets, lengths and addresses."""


ALIGNMENT = max(PAGE, mmap.PAGESIZE)
"""Bytes: extents start and end at multiples, so that each can be transferred directly and mapped into memory."""


def padded(nbytes: int, alignment: int = ALIGNMENT) -> int:
    """``nbytes``, rounded up to a multiple of ``alignment``: by default the length of an extent for them."""
    return -(-nbytes // alignment) * alignment
