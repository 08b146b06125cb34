"""Shortens lists of names in messages to a readable length."""

from __future__ import annotations

from collections.abc import Iterable


def listed(items: Iterable[str], most: int = 4, separator: str = ", ") -> str:
    """Return the first ``most`` items joined by ``separator``, and how many more there are."""
    items = list(items)
    rest = [f"and {len(items) - most} more"] if len(items) > most else []
    return separator.join([*items[:most], *rest])
