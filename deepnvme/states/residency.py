"""Choice of the sub-groups that stay in memory between steps, and estimates of its memory, drive space and writes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from deepnvme.memory.alignment import PAGE, padded
from deepnvme.memory.pool import BufferPool, OutOfBuffers
from deepnvme.telemetry.drive_wear import WriteEstimate

from .gradients import GRADIENTS_IN_FLIGHT
from .partition import SubGroupPlanner
from .sub_group import SubGroup

BLOCKS_IN_FLIGHT = 3
"""Number of sub-groups in flight in a step: one being read, one stepped, one written."""


class ResidencyPolicy:
    """Chooses which sub-groups stay in memory within a budget.

    Args:
        planner: Estimates the size of blocks before their first step.
        memory_budget: Bytes of blocks that may stay in memory, and of their gradients with ``offload_gradients``.
        offload_gradients: Whether gradients are offloaded.
    """

    def __init__(self, planner: SubGroupPlanner, memory_budget: int, offload_gradients: bool) -> None:
        self.planner, self.memory_budget, self._offload_gradients = planner, memory_budget, offload_gradients

    def limit_budget(self, sub_groups: Sequence[SubGroup], free: int) -> None:
        """Lower the budget so that residents and the sub-groups in flight fit into ``free`` bytes. Call before :meth:`choose`."""
        self.memory_budget = max(0, min(self.memory_budget, free * 8 // 9 - self._in_flight_bytes(sub_groups)))

    def choose(self, sub_groups: Iterable[SubGroup]) -> None:
        """Decide which sub-groups are resident: in their order, those whose states and gradients fit into the budget.

        Called when sub-groups are added. Those before them keep their decision, since the first ones come first.
        """
        staying = self._staying(sub_groups)
        for each in sub_groups:
            each.set_resident(each in staying)

    def check_memory(self, sub_groups: Sequence[SubGroup], pool: BufferPool, leased_by_others: int) -> None:
        """Raise OutOfBuffers if the pool's budget is too small for the blocks and gradients of these sub-groups.

        Args:
            sub_groups: All sub-groups.
            pool: The buffer pool to lease from.
            leased_by_others: Bytes of the pool's budget that other users have leased.
        """
        staying = sum(map(self._memory, self._staying(sub_groups)))
        wanted = (staying + self._in_flight_bytes(sub_groups)) * 9 // 8  # a lease may take up to an eighth more than it asks for
        if wanted > pool.budget - leased_by_others:
            largest = max(each.numel for each in sub_groups)
            raise OutOfBuffers(
                f"{BLOCKS_IN_FLIGHT} sub-groups of {largest} elements and memory_budget={self.memory_budget} take {wanted} bytes;"
                f" of the buffer pool's budget of {pool.budget} others have leased {leased_by_others}: give a smaller"
                " sub_group_size or memory_budget, or call set_buffer_budget"
            )

    def _in_flight_bytes(self, sub_groups: Sequence[SubGroup]) -> int:
        """Return the most bytes that sub-groups in flight lease."""
        most = 0
        for each in sub_groups:
            gradients = each.full_gradient_bytes
            if self._offload_gradients:
                gradients += (GRADIENTS_IN_FLIGHT + 1) * _parameter_bytes(each)
            most = max(most, BLOCKS_IN_FLIGHT * self.planner.estimate(each) + gradients)
        return most

    def drive_bytes(self, sub_groups: Sequence[SubGroup]) -> int:
        """Return the most bytes that the sub-groups take on the drive.

        A non-resident sub-group has two versions of its block on the drive. A resident one has one version, which is written so
        that a state dict can map it. If gradients are offloaded, those of all sub-groups are included.
        """
        staying = self._staying(sub_groups)
        return sum(
            (1 if each in staying else 2) * self.planner.block_bytes(each) + self._offload_gradients * _parameter_bytes(each)
            for each in sub_groups
        )

    def estimate_writes(self, sub_groups: Sequence[SubGroup]) -> WriteEstimate:
        """Return how many bytes each step writes: blocks of non-resident sub-groups, and their gradients if offloaded."""
        leaving = [each for each in sub_groups if not each.resident]
        each_step = sum(map(self.planner.block_bytes, leaving))
        if self._offload_gradients:
            each_step += sum(map(_parameter_bytes, leaving))
        return WriteEstimate(bytes_per_step=each_step, most_bytes_per_step=each_step, bytes_once=0)

    def _staying(self, sub_groups: Iterable[SubGroup]) -> set[SubGroup]:
        """Return the sub-groups that fit into the budget by their estimated sizes. The result is the same at any time."""
        staying: set[SubGroup] = set()
        nbytes = 0
        for each in sub_groups:
            if nbytes + self._memory(each) <= self.memory_budget:
                nbytes += self._memory(each)
                staying.add(each)
        return staying

    def _memory(self, sub_group: SubGroup) -> int:
        """Return the bytes of memory that a sub-group takes if it is resident."""
        return self.planner.estimate(sub_group) + (_parameter_bytes(sub_group) if self._offload_gradients else 0)


def _parameter_bytes(sub_group: SubGroup) -> int:
    """Return the bytes of a sub-group's parameters, or of their gradients, each padded to whole pages."""
    return sum(padded(piece.numel * piece.param.element_size(), PAGE) for piece in sub_group.pieces)
