"""Choose which tensors of the sub-groups stay in memory from step to step. Pure functions, so that a table can test them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate, chain, pairwise


def choose_residents(states: Sequence[Sequence[int]], gradients: Sequence[int], limit: int) -> tuple[int, int]:
    """Divide ``limit`` bytes of memory between resident tensors and tensors that are read for each step.

    A step goes through the sub-groups in the same order each time, so what was used last is needed last: the least recently used
    would always be the next one wanted. A fixed set is the best one can do. It is the first ones in order: the step begins with
    them while the others are being read. Passing through takes room for two neighbours, one in use, one on its way.

    Between steps that room is idle, so gradients wait there, those needed first, as far as they leave room to have one sub-group
    read ahead.

    Args:
        states: For each sub-group, in the order of a step, the bytes of each tensor that lasts.
        gradients: For each sub-group, the bytes of its gradient.
        limit: Bytes of memory.

    Returns:
        How many states never leave memory, counted through all sub-groups from the first one on, and how many gradients wait for
        the step in memory, from the first one on.
    """
    every_state = list(chain.from_iterable(states))
    totals = [sum(group) + gradient for group, gradient in zip(states, gradients, strict=True)]
    if sum(totals) <= limit:
        return len(every_state), len(gradients)
    passing = max(one + other for one, other in pairwise([*totals, 0]))
    resident = _fitting(every_state, limit - passing)
    room = limit - sum(every_state[:resident]) - max(map(sum, states))
    return resident, _fitting(gradients, room)


def _fitting(sizes: Iterable[int], room: int) -> int:
    """Return how many of the sizes, from the first one on, fit into ``room`` together."""
    return bisect_right(list(accumulate(sizes)), room)
