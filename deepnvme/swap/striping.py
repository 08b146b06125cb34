"""How much of a tensor goes to each of several directories."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from .extents import ALIGNMENT

STRIPED_FROM = 4 << 20
"""Bytes of a tensor that is worth several drives: one of these moves 1 MiB in less than the time between two requests."""


def shares(nbytes: int, weights: Sequence[float]) -> list[int]:
    """The length of the contiguous part for each directory, in order; they sum to ``nbytes``, and some may be 0.

    Each ends at a multiple of ALIGNMENT but the last that is not empty. They differ from the exact proportions by less than
    ALIGNMENT on either end.
    """
    total = math.fsum(weights)
    bounds = [0]
    for count in range(1, len(weights)):
        exact = nbytes * (math.fsum(weights[:count]) / total)
        bounds.append(min(max(round(exact / ALIGNMENT) * ALIGNMENT, bounds[-1]), nbytes))
    bounds.append(nbytes)
    return [stop - start for start, stop in itertools.pairwise(bounds)]


def emptiest(used: Sequence[int], weights: Sequence[float]) -> int:
    """The index of the directory that holds the least for its weight; the first of equals."""
    return min(range(len(used)), key=lambda index: used[index] / weights[index])
