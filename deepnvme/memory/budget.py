"""Budgets of memory as people write them: in bytes, as a share of what is available, or "auto"."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import TypeAlias

from deepnvme.telemetry.sizes import byte_count, parse_size, refuse_text

from .system_memory import available_memory

MemoryBudget: TypeAlias = int | str
"""An amount of memory: a :data:`ByteCount`, a share of the available memory such as "50%", or "auto".

A share refers to the memory that the machine and the process's control groups have available at the time of the call (see
:func:`available_memory`); for memory of a CUDA device, to the device's free memory. "auto" is half of the available
memory. Where torchrun has started several processes on the machine, "auto" is each process's part of that half.
"""

_SHARE = re.compile(r"(\d{1,24})(?:\.(\d{1,24}))?\s*%", re.ASCII)


def budget_bytes(value: MemoryBudget, name: str, available: Callable[[], int] = available_memory) -> int:
    """Return the bytes of a budget of memory that a user has given.

    Args:
        value: What the user gave.
        name: The name of the argument, for messages.
        available: Returns the available bytes that a share refers to. Called only for a share or "auto".

    Raises:
        TypeError: If ``value`` is neither a whole number nor a text.
        ValueError: If ``value`` is negative, more than 100 %, or a text that is not a budget.
    """
    if not isinstance(value, str):
        return byte_count(value, name)
    text = value.strip()
    if is_automatic(value):
        return available() // 2 // _processes_here()
    share = _SHARE.fullmatch(text)
    if share is None:
        if parse_size(text) is None:
            refuse_text(value, name, ', or a share of the available memory such as "50%", or "auto"')
        return byte_count(value, name)
    fraction = share[2] or ""
    whole: int = 100 * 10 ** len(fraction)
    part = int(share[1] + fraction)
    if part > whole:
        raise ValueError(f"{name} must be at most 100% of the available memory, got {value!r}")
    return available() * part // whole


def is_automatic(value: MemoryBudget) -> bool:
    """Return whether a budget is "auto"."""
    return isinstance(value, str) and value.strip().lower() == "auto"


def _processes_here() -> int:
    """Return how many processes torchrun has started on this machine; 1 without it."""
    count = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, int(count)) if count.isascii() and count.isdecimal() else 1
