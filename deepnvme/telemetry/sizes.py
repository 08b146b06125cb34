"""Numbers of bytes as people write them: 8589934592, "8GB", "512 MiB", "1.5GB", "400M"."""

from __future__ import annotations

import operator
import re
from typing import NoReturn, TypeAlias

ByteCount: TypeAlias = int | str
"""A number of bytes: an int, or a text such as "8GB" (8 * 10**9 bytes), "512MiB" or "512M" (512 * 2**20), or "1024"."""

_SIZE = re.compile(r"(\d{1,24})(?:\.(\d{1,24}))?\s*(?:([KMGTP])(i?))?(B?)", re.ASCII | re.IGNORECASE)
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4, "P": 5}


def parse_size(text: str) -> int | None:
    """Return the bytes of a size, or None if the text is not a size.

    A unit with a B counts in powers of 1000, as for drives and checkpoints: "5GB" is 5 * 10**9 bytes. A unit with an i, or of
    one letter, counts in powers of 1024: "5GiB" and "5G" are 5 * 2**30, the latter as in DeepSpeed's and fio's options. A
    number without a unit is in bytes. Case does not matter, and a space may precede the unit. A fraction, as in "1.5GB",
    needs a unit; the result is rounded down to whole bytes.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None or (match[2] and not match[3]):
        return None
    power = _POWERS[(match[3] or "").upper()]
    unit = (1000 if match[5] and not match[4] else 1024) ** power
    fraction = match[2] or ""
    size: int = int(match[1] + fraction) * unit // 10 ** len(fraction)
    return size


def byte_count(value: ByteCount, name: str, least: int | None = 0) -> int:
    """Return the number of bytes that a user gave as an int or as text.

    Args:
        value: What the user gave.
        name: The name of the argument, for messages.
        least: The least value allowed; None for callers that check the range themselves.

    Raises:
        TypeError: If ``value`` is neither a whole number nor a text.
        ValueError: If ``value`` is a text that is not a size, or is less than ``least``.
    """
    found = _whole_bytes(value, name)
    if least == 0 and found < 0:
        raise ValueError(f"{name} must not be negative, got {found}")
    if least is not None and found < least:
        raise ValueError(f"{name} must be at least {least}, got {value!r}")
    return found


def _whole_bytes(value: ByteCount, name: str) -> int:
    """Return the bytes of an int or a text, negative ones, too. Raises TypeError or ValueError."""
    if isinstance(value, str):
        found = parse_size(value)
        if found is None:
            refuse_text(value, name)
        return found
    try:
        if not isinstance(value, bool):
            return operator.index(value)
    except TypeError:
        pass
    hint = f" (write int({value!r}))" if isinstance(value, float) else ""
    raise TypeError(f'{name} must be a whole number of bytes, or a size such as "8GB" or "512MiB", got {value!r}{hint}')


def refuse_text(text: str, name: str, further: str = "") -> NoReturn:
    """Raise ValueError for a text that is not a number of bytes.

    Args:
        text: What the user gave.
        name: The name of the argument.
        further: Further forms that the argument can have, for the message.
    """
    raise ValueError(f'{name} must be a number of bytes, or a size such as "8GB" or "512MiB"{further}, got {text!r}')
