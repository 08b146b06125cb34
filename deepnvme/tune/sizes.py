"""Sizes as people type and read them: K, M and G are powers of 1024."""

from __future__ import annotations

import re

GIB = 1 << 30
_SHIFTS = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}


def parse_size(text: str | int) -> int:
    """Bytes of "400M", "1G", "64KiB", "4096". Raises ValueError for anything else, and for less than one byte."""
    match = re.fullmatch(r"(\d+)([KMGT]?)(?:i?B)?", str(text).strip(), re.ASCII | re.IGNORECASE)
    size = int(match[1]) << _SHIFTS[match[2].upper()] if match else 0
    if size <= 0:
        raise ValueError(f"must be a size such as 4096, 128K, 400M or 1G, got {text!r}")
    return size


def size_text(size: int) -> str:
    """The shortest exact form that :func:`parse_size` takes: "400M", "4097"."""
    for unit in ("T", "G", "M", "K"):
        if size and size % (1 << _SHIFTS[unit]) == 0:
            return f"{size >> _SHIFTS[unit]}{unit}"
    return str(size)
