"""The error of a measurement that this machine cannot make."""

from __future__ import annotations


class Unsuitable(Exception):
    """Raised if a measurement is not possible on this machine. The message says why and what to do, in one line."""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type's name if it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
