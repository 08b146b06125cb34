"""Chooses which extents stay in memory. Reads nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

_CHOICES = 512
"""Choices that are followed at a time. Models, whose extents have few different sizes, have fewer; beyond, of choices with nearly
the same bytes only the best is followed."""


class _Choice(NamedTuple):
    """A choice of how many extents to keep of each group that was looked at so far."""

    nbytes: int
    """Bytes of the extents that are kept."""
    saved: int
    """Bytes that a pass does not read."""
    counts: tuple[int, ...]
    """Number of extents of each group."""


def residents(sizes: Mapping[str, int], uses: Mapping[str, int], budget: int) -> set[str]:
    """Return the extents that stay in memory, so that a pass reads as few bytes as possible.

    Which of several extents with equal size and uses stay makes no difference to the bytes read. They are spread evenly, so that
    the drive always has something to do while those in memory are used.

    Args:
        sizes: Bytes of each extent, in the order of their use.
        uses: How often a pass uses each extent; 1 for those that are missing.
        budget: Bytes that those which stay may have together.
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
    """Return how many extents to keep of each group: (size, uses) -> number of extents."""
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
    """Return the choices that no other beats with fewer bytes, in order: each takes and saves more than those before."""
    kept: list[_Choice] = []
    for choice in sorted(choices, key=lambda choice: (choice.nbytes, -choice.saved)):
        if not kept or choice.saved > kept[-1].saved:
            kept.append(choice)
    if len(kept) <= _CHOICES:
        return kept
    return list({choice.nbytes * _CHOICES // (budget + 1): choice for choice in kept}.values())


def _spread(keys: list[str], number: int) -> list[str]:
    """Return ``number`` of the extents, evenly spread. The first only if all are: its read can begin before a pass does."""
    return [key for index, key in enumerate(keys) if (index + 1) * number // len(keys) > index * number // len(keys)]
