"""Choose which tensors of the sub-groups stay in memory from step to step. Pure functions, so that a table can test them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate, chain, pairwise


def choose_resident_tensors(states: Sequence[Sequence[int]], gradients: Sequence[int], limit: int) -> tuple[int, int]:
    """Divide ``limit`` bytes of memory between resident tensors and tensors that are read in each step.

    A step uses the sub-groups in the same order each time, so dropping the least recently used sub-group would drop the one
    needed next. A fixed resident set is optimal. It consists of the first sub-groups: a step uses them while the others are being
    read. The others need room for two neighbours at a time: one in use, one being read.

    Between steps that room is free. Gradients are kept there, first those that the step needs first, but one sub-group that is
    read ahead must still fit.

    Args:
        states: For each sub-group, in the order of a step, the bytes of its master weights and of each state.
        gradients: For each sub-group, the bytes of its gradient.
        limit: Bytes of memory.

    Returns:
        The number of resident tensors, counted through all sub-groups from the first one on, and the number of gradients that
        are kept in memory until the step, from the first one on.
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
    """Return how many of the sizes, from the first one on, fit into ``room`` bytes together."""
    return bisect_right(list(accumulate(sizes)), room)
