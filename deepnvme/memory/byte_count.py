"""Numbers of bytes that a user has given."""

from __future__ import annotations

import operator


def byte_count(value: int, name: str) -> int:
    """Return a number of bytes as an int.

    Args:
        value: What the user gave.
        name: The name of the argument, for messages.

    Raises:
        TypeError: If it is no whole number.
        ValueError: If it is negative.
    """
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be a whole number of bytes, got {value!r}") from None
    if number < 0:
        raise ValueError(f"{name} must not be negative, got {number}")
    return number
