"""Parses and formats sizes such as "400M"; K, M, G and T are powers of 1024."""

from __future__ import annotations

import re

GIB = 1 << 30
"""Bytes of a GiB."""
_SHIFTS = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}


def parse_size(text: str | int) -> int:
    """Return the bytes of a size such as "400M", "1G", "64KiB", "4096" or 4096.

    Raises:
        ValueError: If it is no such size, or less than one byte.
    """
    match = re.fullmatch(r"(\d+)([KMGT]?)(?:i?B)?", str(text).strip(), re.ASCII | re.IGNORECASE)
    size = int(match[1]) << _SHIFTS[match[2].upper()] if match else 0
    if size <= 0:
        raise ValueError(f"must be a size such as 4096, 128K, 400M or 1G, got {text!r}")
    return size


def size_text(size: int) -> str:
    """Return the shortest text for a number of bytes that :func:`parse_size` parses exactly: "400M", "4097"."""
    for unit in ("T", "G", "M", "K"):
        if size and size % (1 << _SHIFTS[unit]) == 0:
            return f"{size >> _SHIFTS[unit]}{unit}"
    return str(size)
