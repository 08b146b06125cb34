"""The alignment that direct I/O needs, and rounding up to it."""

from __future__ import annotations

import mmap

PAGE = 4096
"""Bytes. No drive needs file offsets, lengths or memory addresses aligned to more than this."""


ALIGNMENT = max(PAGE, mmap.PAGESIZE)
"""Bytes. Extents start and end at multiples of this, so that each can be transferred by direct I/O and mapped into memory."""


def padded(nbytes: int, alignment: int = ALIGNMENT) -> int:
    """Return ``nbytes`` rounded up to a multiple of ``alignment`` (bytes).

    With the default alignment, this is the length of the extent that stores ``nbytes`` bytes.
    """
    return -(-nbytes // alignment) * alignment
