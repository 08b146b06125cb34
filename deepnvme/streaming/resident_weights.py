"""Which extents stay in memory. Nothing is read here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

_STATES = 512
"""Sums that are tried at a time: all there are for models, whose extents have few different sizes; beyond, the best of those that
are near each other."""


class _State(NamedTuple):
    """A choice of how many extents to keep of each group that was looked at so far."""

    nbytes: int
    """Bytes of the extents that are kept."""
    saved: int
    """Bytes that a pass does not read."""
    counts: tuple[int, ...]
    """Number of extents of each group."""


def residents(sizes: Mapping[str, int], uses: Mapping[str, int], budget: int) -> set[str]:
    """Those that together have at most ``budget`` bytes, such that a pass reads least without them.

    ``sizes``: bytes of each, in the order of their use. ``uses``: how often a pass uses each, 1 where it says nothing.

    Of those with equal size and uses, which of them stays makes no difference to what is read: they are taken evenly spread, so
    that the drive always has something to do while those in memory are used.
    """
    groups: dict[tuple[int, int], list[str]] = {}
    for key, size in sizes.items():
        if size <= budget:
            groups.setdefault((size, uses.get(key, 1)), []).append(key)
    counts = _counts({group: len(keys) for group, keys in groups.items()}, budget)
    return {key for keys, count in zip(groups.values(), counts, strict=True) for key in _spread(keys, count)}


def saved_bytes(kept: Iterable[str], sizes: Mapping[str, int], uses: Mapping[str, int]) -> int:
    """What a pass does not read because these stay."""
    return sum(sizes[key] * uses[key] for key in kept)


def _counts(groups: Mapping[tuple[int, int], int], budget: int) -> tuple[int, ...]:
    """Return how many extents to keep of each group: (size, uses) -> number of extents."""
    states = [_State(0, 0, ())]
    for (size, uses), count in groups.items():
        states = _best(
            [
                _State(state.nbytes + number * size, state.saved + number * size * uses, (*state.counts, number))
                for state in states
                for number in range(min(count, (budget - state.nbytes) // size if size else count) + 1)
            ],
            budget,
        )
    return states[-1].counts


def _best(states: list[_State], budget: int) -> list[_State]:
    """Those that no other beats with fewer bytes; each takes and saves more than those before."""
    kept: list[_State] = []
    for state in sorted(states, key=lambda state: (state.nbytes, -state.saved)):
        if not kept or state.saved > kept[-1].saved:
            kept.append(state)
    if len(kept) <= _STATES:
        return kept
    return list({state.nbytes * _STATES // (budget + 1): state for state in kept}.values())


def _spread(keys: list[str], number: int) -> list[str]:
    """So many of them, at even distances; the first is not among them unless all are: reading it can begin before a pass does."""
    return [key for index, key in enumerate(keys) if (index + 1) * number // len(keys) > index * number // len(keys)]
