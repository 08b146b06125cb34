"""Lists in messages, no longer than can be read."""

from __future__ import annotations

from collections.abc import Iterable


def listed(items: Iterable[str], most: int = 4, separator: str = ", ") -> str:
    """The first ``most``, and how many more there are."""
    items = list(items)
    rest = [f"and {len(items) - most} more"] if len(items) > most else []
    return separator.join([*items[:most], *rest])
