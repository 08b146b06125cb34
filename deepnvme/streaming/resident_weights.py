"""Chooses which extents stay in memory. Reads nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

_CHOICES = 512
"""Most choices that the search keeps.

Models have few different extent sizes, and need fewer; if a model needs more, only the best of choices with nearly the
same bytes is kept.
"""


class _Choice(NamedTuple):
    """How many extents to keep in memory of each group considered so far. A group has extents of equal size and uses."""

    nbytes: int
    """Bytes of memory for the extents that are kept."""
    saved: int
    """Bytes that a pass need not read because of this choice."""
    counts: tuple[int, ...]
    """Number of extents to keep of each group, in the order of the groups."""


def residents(sizes: Mapping[str, int], uses: Mapping[str, int], budget: int) -> set[str]:
    """Choose the extents that stay in memory, so that a pass reads as few bytes as possible.

    Among extents of equal size and uses, the choice makes no difference to the bytes read. The chosen ones are spread
    evenly, so that the drive always has something to read while resident extents are used.

    Args:
        sizes: Bytes of each extent, in the order of their use.
        uses: How often a pass uses each extent; 1 for extents that are missing here.
        budget: Most bytes of all resident extents together.
    """
    groups: dict[tuple[int, int], list[str]] = {}
    for key, size in sizes.items():
        if size <= budget:
            groups.setdefault((size, uses.get(key, 1)), []).append(key)
    counts = _counts({group: len(keys) for group, keys in groups.items()}, budget)
    return {key for keys, count in zip(groups.values(), counts, strict=True) for key in _spread(keys, count)}


def saved_bytes(kept: Iterable[str], sizes: Mapping[str, int], uses: Mapping[str, int]) -> int:
    """Return the bytes that a pass does not read because these extents stay in memory."""
    return sum(sizes[key] * uses[key] for key in kept)


def _counts(groups: Mapping[tuple[int, int], int], budget: int) -> tuple[int, ...]:
    """Return how many extents to keep of each group. ``groups``: number of extents by (size, uses)."""
    choices = [_Choice(0, 0, ())]
    for (size, uses), count in groups.items():
        choices = _best(
            [
                _Choice(choice.nbytes + number * size, choice.saved + number * size * uses, (*choice.counts, number))
                for choice in choices
                for number in range(min(count, (budget - choice.nbytes) // size if size else count) + 1)
            ],
            budget,
        )
    return choices[-1].counts


def _best(choices: list[_Choice], budget: int) -> list[_Choice]:
    """Drop each choice that another one beats with no more bytes and no less saved. Returns the rest, ascending by bytes.

    If more than ``_CHOICES`` are left, of choices with nearly the same bytes only the last is returned.
    """
    kept: list[_Choice] = []
    for choice in sorted(choices, key=lambda choice: (choice.nbytes, -choice.saved)):
        if not kept or choice.saved > kept[-1].saved:
            kept.append(choice)
    if len(kept) <= _CHOICES:
        return kept
    return list({choice.nbytes * _CHOICES // (budget + 1): choice for choice in kept}.values())


def _spread(keys: list[str], number: int) -> list[str]:
    """Return ``number`` of the extents, evenly spread. Prefers not to keep the first: it can be read before a pass begins."""
    return [key for index, key in enumerate(keys) if (index + 1) * number // len(keys) > index * number // len(keys)]
