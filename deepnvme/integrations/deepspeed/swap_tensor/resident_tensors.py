"""What of the sub-groups stays in memory from step to step. Decided here without any effect, so that a table can test it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Footprint:
    """Bytes of one sub-group: of each tensor that lasts, and of its gradient."""

    states: tuple[int, ...]
    gradient: int

    @property
    def total(self) -> int:
        return sum(self.states) + self.gradient


@dataclass(frozen=True)
class ResidencyPlan:
    """For each sub-group, in the order of a step."""

    resident_states: tuple[int, ...]
    """How many of its states, from the first on, never leave memory."""
    kept_gradients: tuple[bool, ...]
    """Whether its gradient waits for the step in memory."""
    gradient_bytes: int
    """Of those gradients."""


def plan(groups: Sequence[Footprint], limit: int) -> ResidencyPlan:
    """Share ``limit`` bytes of memory between what stays and what passes through.

    A step goes through the sub-groups in the same order each time, so what was used last is needed last: the least recently used
    would always be the next one wanted. A fixed set is the best one can do. It is the first ones in order: the step begins with
    them while the others are being read. Passing through takes room for two neighbours, one in use, one on its way.

    Between steps that room is idle, so gradients wait there, those needed first, as far as they leave room to have one sub-group
    read ahead.
    """
    if sum(group.total for group in groups) <= limit:
        return ResidencyPlan(tuple(len(group.states) for group in groups), (True,) * len(groups), sum(g.gradient for g in groups))
    passing = max(sum(group.total for group in groups[at : at + 2]) for at in range(len(groups)))
    spare = limit - passing
    residents = []
    for group in groups:
        count = 0
        while count < len(group.states) and group.states[count] <= spare:
            spare -= group.states[count]
            count += 1
        if count < len(group.states):
            spare = 0  # in order, without gaps
        residents.append(count)
    resident_bytes = sum(sum(group.states[:count]) for group, count in zip(groups, residents, strict=True))
    room = limit - resident_bytes - max(sum(group.states) for group in groups)
    kept: list[bool] = []
    gradient_bytes = 0
    for group in groups:
        keep = len(kept) == sum(kept) and gradient_bytes + group.gradient <= room
        kept.append(keep)
        gradient_bytes += group.gradient if keep else 0
    return ResidencyPlan(tuple(residents), tuple(kept), gradient_bytes)
