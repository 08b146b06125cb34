"""Sizes on command lines and in reports: "400M", where K, M, G and T are powers of 1024, as in DeepSpeed's and fio's options."""

from __future__ import annotations

from deepnvme import _sizes

GIB = 1 << 30
"""Bytes of a GiB."""
_SHIFTS = {"K": 10, "M": 20, "G": 30, "T": 40}


def parse_size(text: str | int) -> int:
    """Return the bytes of a size such as "400M", "1G", "64KiB", "4096" or 4096: see :func:`deepnvme._sizes.parse_size`.

    Raises:
        ValueError: If it is no such size, or less than one byte.
    """
    size = _sizes.parse_size(str(text)) or 0
    if size <= 0:
        raise ValueError(f"must be a size such as 4096, 128K, 400M or 1G, got {text!r}")
    return size


def check_number(value: object, name: str) -> None:
    """Raise TypeError, which names the argument, if a number of bytes is no int: texts are for command lines."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be an int, a number of bytes, got {value!r}")


def size_text(size: int) -> str:
    """Return the shortest text for a number of bytes that :func:`parse_size` parses exactly: "400M", "4097"."""
    for unit in ("T", "G", "M", "K"):
        if size and size % (1 << _SHIFTS[unit]) == 0:
            return f"{size >> _SHIFTS[unit]}{unit}"
    return str(size)
