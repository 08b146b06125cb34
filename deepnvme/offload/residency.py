"""Decide which sub-groups stay in memory, and check that memory and drive have room."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from deepnvme.memory.alignment import PAGE, padded
from deepnvme.memory.pool import BufferPool, OutOfBuffers

from .gradients import OPEN
from .planner import SubGroupPlanner
from .sub_group import SubGroup

RING = 3
"""How many sub-groups are in flight in a step: one being read, one stepped, one written."""


class ResidencyPolicy:
    """Chooses which sub-groups stay in memory within a budget.

    Args:
        plan: Estimates the size of blocks before their first step.
        dram_budget: Bytes of blocks that may stay in memory, and of their gradients with ``offload_gradients``.
        offload_gradients: Whether gradients are offloaded.
    """

    def __init__(self, plan: SubGroupPlanner, dram_budget: int, offload_gradients: bool) -> None:
        self._plan, self._dram_budget, self._offload_gradients = plan, dram_budget, offload_gradients

    def choose(self, sub_groups: Sequence[SubGroup]) -> None:
        """Set ``in_memory`` of each sub-group that has a block by now and no decision yet, in order, within the budget.

        A decision holds until :meth:`beyond_budget` returns the sub-group, or other states are loaded.
        """
        in_memory = sum(self._memory(each) for each in sub_groups if each.in_memory)
        for each in sub_groups:
            if each.in_memory is None and each.layout is not None:
                each.in_memory = in_memory + self._memory(each) <= self._dram_budget
                in_memory += self._memory(each) * each.in_memory

    def beyond_budget(self, sub_groups: Sequence[SubGroup]) -> list[SubGroup]:
        """Return the resident sub-groups that must leave memory because states have grown: the last ones in order."""
        leaving = []
        staying = [each for each in sub_groups if each.in_memory]
        too_much = sum(map(self._memory, staying)) - self._dram_budget
        while too_much > 0:
            leaving.append(staying.pop())
            too_much -= self._memory(leaving[-1])
        return leaving

    def check_memory(self, sub_groups: Sequence[SubGroup], pool: BufferPool, leased_by_others: int) -> None:
        """Raise OutOfBuffers if the pool's budget is too small for the resident sub-groups and those in flight.

        Counted are blocks, copies of parameters, and gradients.

        Args:
            sub_groups: All sub-groups.
            pool: The pool to lease from.
            leased_by_others: Bytes of the pool's budget that are not available.
        """
        staying = self._expected_to_stay(sub_groups)
        ring, largest = 0, 0
        for each in sub_groups:  # resident ones too: their first step goes through the drive
            largest = max(largest, each.numel)
            gradients = (OPEN + 1) * _parameter_bytes(each) if self._offload_gradients else 0
            ring = max(ring, RING * (self._plan.estimate(each) + _parameter_bytes(each)) + each.full_gradient_bytes + gradients)
        wanted = (sum(map(self._memory, staying)) + ring) * 9 // 8  # a lease may take up to an eighth more than was asked for
        if wanted > pool.budget - leased_by_others:
            raise OutOfBuffers(
                f"{RING} sub-groups of {largest} elements and dram_budget={self._dram_budget} take {wanted} bytes; of the buffer"
                f" pool's budget of {pool.budget} others have leased {leased_by_others}: give a smaller sub_group_size or"
                " dram_budget, or call set_buffer_budget"
            )

    def drive_bytes(self, sub_groups: Sequence[SubGroup]) -> int:
        """Return the most bytes that the sub-groups take on the drive.

        Each has two blocks there, or one if it stays in memory, from which checkpoints are mapped. To these come copies of its
        parameters to undo a step with, and its gradients if they are offloaded.
        """
        staying = self._expected_to_stay(sub_groups)
        return sum(
            (1 if each in staying else 2) * self._block(each) + (1 + self._offload_gradients) * _parameter_bytes(each)
            for each in sub_groups
        )

    def _expected_to_stay(self, sub_groups: Iterable[SubGroup]) -> set[SubGroup]:
        staying: set[SubGroup] = set()
        nbytes = 0
        for each in sub_groups:
            if each.in_memory is not False and nbytes + self._memory(each) <= self._dram_budget:
                nbytes += self._memory(each)
                staying.add(each)
        return staying

    def _block(self, sub_group: SubGroup) -> int:
        """Return the bytes of a sub-group's block; an estimate before its first step."""
        return self._plan.estimate(sub_group) if sub_group.layout is None else sub_group.layout.nbytes

    def _memory(self, sub_group: SubGroup) -> int:
        return self._block(sub_group) + (_parameter_bytes(sub_group) if self._offload_gradients else 0)


def _parameter_bytes(sub_group: SubGroup) -> int:
    """Return the bytes of a sub-group's parameters, or of their gradients, each padded to whole pages."""
    return sum(padded(piece.numel * piece.param.element_size(), PAGE) for piece in sub_group.pieces)
