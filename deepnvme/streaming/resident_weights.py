"""Chooses which extents stay in memory. Reads nothing."""

from __future__ import annotations

from collections.abc import Mapping


def residents(sizes: Mapping[str, int], budget: int) -> set[str]:
    """Choose the extents that stay in memory: as many bytes as fit, the largest extents first.

    Among extents of equal size the choice makes no difference to the bytes read. The chosen ones are spread evenly, so that the
    drive always has something to read while resident extents are used.

    Args:
        sizes: Bytes of each extent, in the order of their use.
        budget: Most bytes of all resident extents together.
    """
    groups: dict[int, list[str]] = {}
    for key, size in sizes.items():
        groups.setdefault(size, []).append(key)
    chosen: set[str] = set()
    for size, keys in sorted(groups.items(), reverse=True):
        count = min(len(keys), budget // size if size else len(keys))
        chosen |= _spread(keys, count)
        budget -= count * size
    return chosen


def _spread(keys: list[str], number: int) -> set[str]:
    """Return ``number`` of the extents, evenly spread. Prefers not to keep the first: it can be read before a pass begins."""
    return {key for index, key in enumerate(keys) if (index + 1) * number // len(keys) > index * number // len(keys)}
