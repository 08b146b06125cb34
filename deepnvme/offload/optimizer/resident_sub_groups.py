"""Which sub-groups stay in memory from step to step, and the blocks of those that do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from deepnvme._drive_wear import WriteEstimate
from deepnvme._interrupts import defer_interrupts
from deepnvme.memory.alignment import PAGE, padded
from deepnvme.memory.host import give_back_heap
from deepnvme.memory.pool import BufferPool, OutOfBuffers
from deepnvme.transfer.block_cache import BlockCache
from deepnvme.transfer.block_memory import PooledMemory

from .block_versions import BlockVersions, block_name
from .counted_io import CountedIO, StoredBlock, shortage
from .gradients import OPEN, SubGroupGradients
from .partition import SubGroupPlanner
from .sub_group import SubGroup

RING = 3
"""How many sub-groups are in flight in a step: one being read, one stepped, one written."""


class ResidencyPolicy:
    """Chooses which sub-groups stay in memory within a budget.

    Args:
        planner: Estimates the size of blocks before their first step.
        dram_budget: Bytes of blocks that may stay in memory, and of their gradients with ``offload_gradients``.
        offload_gradients: Whether gradients are offloaded.
    """

    def __init__(self, planner: SubGroupPlanner, dram_budget: int, offload_gradients: bool) -> None:
        self._planner, self._dram_budget, self._offload_gradients = planner, dram_budget, offload_gradients

    @property
    def dram_budget(self) -> int:
        """Bytes of blocks that may stay in memory."""
        return self._dram_budget

    def limit_budget(self, sub_groups: Sequence[SubGroup], free: int) -> None:
        """Lower the budget to what free memory has room for beside the sub-groups in flight. For before :meth:`choose`."""
        self._dram_budget = max(0, min(self._dram_budget, free * 8 // 9 - self._in_flight(sub_groups, self._planner.estimate)))

    def choose(self, sub_groups: Sequence[SubGroup]) -> None:
        """Set ``in_memory`` of each sub-group that has a block by now and no decision yet, in order, within the budget.

        A decision holds until :meth:`beyond_budget` returns the sub-group, or other states are loaded.
        """
        in_memory = sum(self._memory(each) for each in sub_groups if each.in_memory)
        for each in sub_groups:
            if each.in_memory is None and each.layout is not None:
                each.decide_residency(in_memory + self._memory(each) <= self._dram_budget)
                in_memory += self._memory(each) if each.in_memory else 0

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
        wanted = self._most_memory(sub_groups, self._planner.estimate)
        if wanted > pool.budget - leased_by_others:
            largest = max(each.numel for each in sub_groups)
            raise OutOfBuffers(
                f"{RING} sub-groups of {largest} elements and dram_budget={self._dram_budget} take {wanted} bytes; of the buffer"
                f" pool's budget of {pool.budget} others have leased {leased_by_others}: give a smaller sub_group_size or"
                " dram_budget, or call set_buffer_budget"
            )

    def needed_memory(self, sub_groups: Sequence[SubGroup]) -> int:
        """Return the most bytes that a step may lease beside the residents that are in memory already."""
        resident = sum(each.resident.nbytes for each in sub_groups if each.resident is not None)
        return max(0, self._most_memory(sub_groups, self._block) - resident)

    def _most_memory(self, sub_groups: Sequence[SubGroup], block_bytes: Callable[[SubGroup], int]) -> int:
        """Return the most bytes that the resident sub-groups and those in flight lease, where blocks have these sizes."""
        staying = sum(map(self._memory, self._expected_to_stay(sub_groups)))
        # A lease may take up to an eighth more than was asked for.
        return (staying + self._in_flight(sub_groups, block_bytes)) * 9 // 8

    def _in_flight(self, sub_groups: Sequence[SubGroup], block_bytes: Callable[[SubGroup], int]) -> int:
        """Return the most bytes that the sub-groups in flight want, where blocks have these sizes."""
        most = 0
        for each in sub_groups:  # resident ones too: their first step goes through the drive
            gradients = each.full_gradient_bytes + ((OPEN + 1) * _parameter_bytes(each) if self._offload_gradients else 0)
            most = max(most, RING * (block_bytes(each) + _parameter_bytes(each)) + gradients)
        return most

    def drive_bytes(self, sub_groups: Sequence[SubGroup]) -> int:
        """Return the most bytes that the sub-groups take on the drive.

        Each has two blocks there, or one if it stays in memory, from which checkpoints are mapped. To these come copies of its
        parameters to undo a step with, as memory may have no room for them, and its gradients if they are offloaded.
        """
        staying = self._expected_to_stay(sub_groups)
        return sum(
            (1 if each in staying else 2) * self._block(each) + (1 + self._offload_gradients) * _parameter_bytes(each)
            for each in sub_groups
        )

    def estimate_writes(self, sub_groups: Sequence[SubGroup]) -> WriteEstimate:
        """Return how many bytes steps will write. What stays in memory is written once, by its first step.

        Copies of parameters, to undo a step with, are written only where memory has no room for them.
        """
        staying = self._expected_to_stay(sub_groups)
        leaving = [each for each in sub_groups if each not in staying]
        each_step = sum(map(self._block, leaving))
        if self._offload_gradients:
            each_step += sum(map(_parameter_bytes, leaving))
        copies = sum(each.bytes_without_master for each in leaving)
        first_step = sum(self._memory(each) for each in staying if each.resident is None)
        return WriteEstimate(bytes_per_step=each_step, most_bytes_per_step=each_step + copies, bytes_once=first_step)

    def _expected_to_stay(self, sub_groups: Iterable[SubGroup]) -> set[SubGroup]:
        """Return the sub-groups that will stay in memory, as far as their states' sizes can be estimated."""
        staying: set[SubGroup] = set()
        nbytes = 0
        for each in sub_groups:
            if each.in_memory is not False and nbytes + self._memory(each) <= self._dram_budget:
                nbytes += self._memory(each)
                staying.add(each)
        return staying

    def _block(self, sub_group: SubGroup) -> int:
        """Return the bytes of a sub-group's block; an estimate before its first step."""
        return self._planner.estimate(sub_group) if sub_group.layout is None else sub_group.layout.nbytes

    def _memory(self, sub_group: SubGroup) -> int:
        return self._block(sub_group) + (_parameter_bytes(sub_group) if self._offload_gradients else 0)


def image_name(sub_group: SubGroup) -> str:
    """Return the store's name for the copy of a sub-group's parameters before the step, from which the step is undone."""
    return f"{sub_group.index}.image"


class ResidentBlocks:
    """Keeps the blocks of some sub-groups in memory from step to step, where they have no second copy.

    They come from the drive, where their first step has left them: what fails in the optimizer's own code mostly does so in the
    first step, and there it can be undone.
    """

    def __init__(self, io: CountedIO, blocks: BlockVersions, pool: BufferPool) -> None:
        self._io, self._blocks, self._pool = io, blocks, pool

    def load(self, sub_groups: Sequence[SubGroup]) -> None:
        """Read the blocks of these sub-groups into memory, and wait for them.

        Raises OSError or MemoryError. Then none was loaded.
        """
        blocks = {}
        for each in sub_groups:
            if each.resident is None:
                assert each.layout is not None
                blocks[each] = StoredBlock(block_name(each), each.layout.nbytes)
        memory = PooledMemory(self._pool, sum(block.nbytes for block in blocks.values()), shortage)
        cache = BlockCache(self._io, memory)
        with self._io.times.waiting:
            try:
                cache.acquire(blocks.values())
            finally:
                cache.drain()  # one error is raised, and the others are the same drive's
        for each, block in blocks.items():
            each.came_to_memory(block.memory)

    def step(self, sub_group: SubGroup, gradients: SubGroupGradients, groups: Sequence[dict[str, Any]]) -> None:
        """Step a sub-group whose block is in memory, in place. Its block on the drive is an older step's from then on."""
        assert sub_group.resident is not None
        sub_group.current_states_are_in(None)
        collected, scratch = gradients.take(sub_group)
        with self._io.times.computing:
            held = sub_group.step(sub_group.resident.buffer, collected, scratch, groups)
            if held is not None:
                layout = sub_group.lay_out(held)
                lease = self._pool.lease(max(layout.nbytes, 1))
                layout.fill(lease.buffer, [tensor for _, _, tensor in held])
                sub_group.came_to_memory(lease)  # the old lease ends with the last who knows it: the step may be undone
                del held
                give_back_heap()

    def write(self, sub_group: SubGroup) -> None:
        """Write a block that is in memory only to the drive, to be mapped: a copy in memory would double it. Blocks."""
        if sub_group.resident is None or sub_group.current is not None:
            return
        assert sub_group.layout is not None
        number = self._blocks.next_of(sub_group)
        block = sub_group.resident.buffer[: sub_group.layout.nbytes]
        with self._io.aside():
            self._io.put(block_name(sub_group, number), block).result()
        sub_group.current_states_are_in(number)

    def dismiss(self, sub_group: SubGroup) -> None:
        """Keep this sub-group's block on the drive only, from now on. Raises OSError, and nothing is changed."""
        self.write(sub_group)
        with defer_interrupts():
            sub_group.decide_residency(False)
            sub_group.release_memory()


def _parameter_bytes(sub_group: SubGroup) -> int:
    """Return the bytes of a sub-group's parameters, or of their gradients, each padded to whole pages."""
    return sum(padded(piece.numel * piece.param.element_size(), PAGE) for piece in sub_group.pieces)
