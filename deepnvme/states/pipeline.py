"""Stepping of sub-groups, whose blocks are read ahead and written behind, or stay in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from deepnvme._interrupts import defer_interrupts
from deepnvme.cache.block import Block, State
from deepnvme.cache.block_cache import BlockCache, Use
from deepnvme.cache.block_memory import PooledMemory
from deepnvme.memory.pool import BufferPool

from .counted_io import CountedIO, StoredBlock, shortage
from .gradients import SubGroupGradients
from .partition import SubGroupPlanner
from .residency import BLOCKS_IN_FLIGHT
from .sub_group import BlockTensors, SubGroup
from .sub_group_states import SubGroupStates
from .versions import BlockVersions, block_name

StepInputs = tuple[dict[int, torch.Tensor], torch.Tensor]
"""Arguments for :meth:`SubGroup.step`: gradients by index of the piece, and memory for converting gradients to float32."""


class SubGroupPipeline:
    """Steps sub-groups one at a time: :meth:`expect` them; :meth:`load`, :meth:`step`, :meth:`write_behind` each; :meth:`drain`.

    The states of a sub-group are one block. A block that is written goes beside the version that it was read from. The block of
    a resident sub-group stays in memory, and is written only for a state dict.

    Args:
        io: Reads and writes blocks.
        versions: Chooses where blocks are written.
        gradients: Provides the gradients. They are read ahead, too.
        planner: Estimates how large the first block of a sub-group becomes.
        pool: Where memory is leased.
    """

    def __init__(
        self, io: CountedIO, versions: BlockVersions, gradients: SubGroupGradients, planner: SubGroupPlanner, pool: BufferPool
    ) -> None:
        self._io, self.versions, self._gradients, self._planner, self._pool = io, versions, gradients, planner, pool
        self._memory = PooledMemory(pool, 0, shortage, separate_residents=True)
        self.cache = BlockCache(io, self._memory, read_again=False, leased=io.leased)
        self._blocks: dict[SubGroup, SubGroupStates] = {}
        self._largest = 1
        """Bytes of the largest block."""
        self._in_flight = BLOCKS_IN_FLIGHT
        """Number of non-resident blocks that the memory has room for."""
        self._upcoming: list[SubGroup] = []

    @property
    def resident_bytes(self) -> int:
        """Bytes of memory that are leased for the blocks of resident sub-groups."""
        return sum(block.nbytes for block in self._blocks_in_memory() if block.resident)

    # -- the blocks of a step

    def best_order(self, sub_groups: Sequence[SubGroup]) -> list[SubGroup]:
        """Return the order in which to step these sub-groups.

        The order begins at the end of the list whose blocks the last step left in memory. Resident sub-groups are spread evenly:
        while they are stepped, the drive reads and writes for the others.
        """
        residents = [each for each in sub_groups if each.resident]
        others = [each for each in sub_groups if not each.resident]
        in_memory = set(self._blocks_in_memory())
        kept = [self._of(each).block in in_memory for each in others]
        half = len(others) // 2
        if sum(kept[:half]) < sum(kept[half:]):
            others.reverse()
        places = [((at + 0.5) / len(group), each) for group in (others, residents) for at, each in enumerate(group)]
        return [each for _, each in sorted(places, key=lambda place: place[0])]

    def expect(self, sub_groups: Sequence[SubGroup]) -> None:
        """Start reading ahead blocks and gradients of these sub-groups, which will be stepped in this order."""
        self.cache.expect(())  # what could not be read ahead for an earlier step is read again
        self._gradients.expect(())
        self._upcoming = list(sub_groups)
        self._leave_room_for(sub_groups)
        self.cache.expect(self._coming())
        self._gradients.expect(self._upcoming)

    def load(self, sub_group: SubGroup) -> StepInputs:
        """Bring a sub-group's block and gradients into memory, and begin a use of the block. Waits for reads.

        Returns:
            The arguments for :meth:`step`, valid until the next call.

        Raises:
            OSError: From these reads, or from a write since the last :meth:`drain`. The sub-group is unchanged.
            OutOfBuffers: If others have leased the memory for the block.
        """
        if sub_group in self._upcoming:
            self._upcoming.remove(sub_group)
        self._leave_room_for([sub_group])  # backward may complete sub-groups that were not expected
        with self._io.times.waiting:
            if sub_group.layout is None:
                self.cache.drop_clean()  # the first step makes the states in ordinary memory, beside the block
                self.cache.raise_failure()
            self._of(sub_group).load()
        self._io.record_ended()
        inputs = self._gradients.take(sub_group)
        self._gradients.expect(self._upcoming)
        return inputs

    def step(self, sub_group: SubGroup, inputs: StepInputs, groups: Sequence[dict[str, Any]]) -> None:
        """Step a sub-group that :meth:`load` has loaded, with interrupts deferred. Raises like :meth:`SubGroupStates.step`."""
        with self._io.times.computing:
            self._of(sub_group).step(*inputs, groups)

    def write_behind(self, sub_group: SubGroup) -> None:
        """Start writing a sub-group that was stepped, with interrupts deferred. Raises like :meth:`SubGroupStates.write`."""
        self._of(sub_group).write()
        self.cache.poll()  # a write may have ended during the step: its memory is for the next read
        self._io.record_ended()

    def drain(self) -> None:
        """Wait for all transfers. Raises the OSError of the first write that failed; its block stays in memory."""
        with self._io.times.waiting:
            self.cache.drain()
        self._io.record_ended()
        self.cache.raise_failure()

    def write_again(self) -> None:
        """Write the blocks whose writes have failed once more, to another version, and wait until they are written.

        Raises:
            OSError: If a write fails again.
            OutOfBuffers: If there is no memory for a new block.
        """
        with self._io.times.waiting:
            self.cache.drain()  # a write may be under way yet that fails
            failed = [each for each in self._blocks.values() if each.block is not None and each.block.state is State.DIRTY]
            for each in failed:
                if not each.sub_group.resident:
                    each.choose_version()  # a disk that was full has room where no state dict is mapped any more
            self.cache.flush(each.stored_block() for each in failed if not each.sub_group.resident)
            for each in self._blocks.values():
                if each.unplaced is not None:
                    with defer_interrupts():
                        each.write()

    def end_uses(self) -> None:
        """End the use of a block that was loaded but not stepped, after an exception."""
        self.cache.end_uses()

    def commit(self) -> None:
        """End a step. The next one may have more blocks in flight than a first step."""
        self._upcoming.clear()
        self._in_flight = BLOCKS_IN_FLIGHT

    # -- outside a step

    def write_resident(self, sub_group: SubGroup) -> None:
        """Write a resident sub-group's block to the drive, so that a state dict can map it. Blocks.

        Does nothing if the drive has these states already. Raises OSError; the states then stay in memory, and the next call
        writes them again.
        """
        states = self._of(sub_group)
        if states.block is not None and states.block.state in (State.DIRTY, State.WRITING):
            if states.block.state is State.DIRTY:
                states.choose_version()
            with self._io.aside():
                self.cache.flush([states.block])

    def store(self, sub_group: SubGroup, tensors: BlockTensors) -> None:
        """Write ``tensors`` as the sub-group's next version, beside the current one, and wait for the write. Raises OSError."""
        layout = sub_group.lay_out(tensors)
        number = self.versions.next_of(sub_group)
        with self._pool.lease(max(layout.nbytes, 1)) as lease:
            content = lease.buffer[: layout.nbytes]
            layout.fill(content, [tensor for _, _, tensor in tensors])
            self._io.put(block_name(sub_group, number), content).result()
        sub_group.set_current_block(number)

    def drop_clean(self) -> None:
        """Drop clean blocks, whose bytes are also on the drive, from memory. Waits for transfers."""
        self.cache.drop_clean()

    def clear(self) -> None:
        """Drop all blocks from memory, including those not yet written. Waits for transfers."""
        self._blocks.clear()
        self._upcoming.clear()
        self.cache.clear()

    # -- blocks, and the memory for them

    def acquire(self, block: Block) -> None:
        """Begin a use of a block, and read expected blocks ahead. Blocks. Raises like :meth:`BlockCache.acquire`."""
        self.cache.acquire([block], then=self._coming())

    def create(self, block: Block) -> None:
        """Begin a use of a block that the caller will fill; the block is not read. May wait for memory.

        Raises like :meth:`BlockCache.create`.
        """
        self.cache.create(block)

    def memory_bytes(self, sub_group: SubGroup) -> int:
        """Return the bytes of the largest block so far. All non-resident blocks lease as much, so that memory is reused."""
        self._leave_room_for([sub_group])
        return self._largest

    def _of(self, sub_group: SubGroup) -> SubGroupStates:
        if sub_group not in self._blocks:
            self._blocks[sub_group] = SubGroupStates(sub_group, self)
        return self._blocks[sub_group]

    def _blocks_in_memory(self) -> list[StoredBlock]:
        return [each.block for each in self._blocks.values() if each.block is not None and each.block.in_memory]

    def _leave_room_for(self, sub_groups: Sequence[SubGroup]) -> None:
        """Set the memory limit so that blocks of these sub-groups fit.

        The first step of a sub-group makes its states in ordinary memory. To take no more memory than other steps, such a step
        has only one block in flight.
        """
        if any(each.layout is None for each in sub_groups):
            self._in_flight = 1
        self._largest = max([self._largest, *map(self._planner.block_bytes, sub_groups)])
        self._memory.limit = self._in_flight * self._largest

    def _coming(self) -> list[Use]:
        """Return the next expected uses of blocks that have to be read, at most as many as can be in memory."""
        blocks = (self._of(each).stored_block() for each in self._upcoming if each.layout is not None)
        wanted = (block for block in blocks if not (block.resident and block.in_memory))
        return [Use(block) for block, _ in zip(wanted, range(BLOCKS_IN_FLIGHT), strict=False)]
