"""Stepping of sub-groups, whose blocks are read ahead and written behind, or stay in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from deepnvme._interrupts import defer_interrupts
from deepnvme.cache.block import State
from deepnvme.cache.block_cache import BlockCache, Use
from deepnvme.cache.block_memory import PooledMemory
from deepnvme.memory.host import trim_heap
from deepnvme.memory.pool import BufferPool

from .counted_io import CountedIO, StoredBlock, shortage
from .gradients import SubGroupGradients
from .partition import SubGroupPlanner
from .residency import BLOCKS_IN_FLIGHT
from .sub_group import BlockTensors, SubGroup
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
        self._io, self._versions, self._gradients, self._planner, self._pool = io, versions, gradients, planner, pool
        self._memory = PooledMemory(pool, 0, shortage, separate_residents=True)
        self._cache = BlockCache(io, self._memory, read_again=False)
        self._blocks: dict[SubGroup, StoredBlock] = {}
        self._largest = 1
        """Bytes of the largest block. All non-resident blocks lease this size, so that pinned memory is reused."""
        self._in_flight = BLOCKS_IN_FLIGHT
        """Number of non-resident blocks that the memory has room for."""
        self._upcoming: list[SubGroup] = []
        self._unplaced: dict[SubGroup, BlockTensors] = {}
        """State tensors that a step has made and that no block holds yet, by sub-group."""

    @property
    def leased_bytes(self) -> int:
        """Bytes of memory that are leased for blocks."""
        return sum(block.nbytes for block in self._blocks.values() if block.in_memory)

    @property
    def resident_bytes(self) -> int:
        """Bytes of memory that are leased for the blocks of resident sub-groups."""
        return sum(block.nbytes for block in self._blocks.values() if block.in_memory and block.resident)

    # -- the blocks of a step

    def best_order(self, sub_groups: Sequence[SubGroup]) -> list[SubGroup]:
        """Return the order in which to step these sub-groups.

        The order begins at the end of the list whose blocks the last step left in memory. Resident sub-groups are spread evenly:
        while they are stepped, the drive reads and writes for the others.
        """
        residents = [each for each in sub_groups if each.in_memory]
        others = [each for each in sub_groups if not each.in_memory]
        kept = [each in self._blocks and self._blocks[each].in_memory for each in others]
        half = len(others) // 2
        if sum(kept[:half]) < sum(kept[half:]):
            others.reverse()
        places = [((at + 0.5) / len(group), each) for group in (others, residents) for at, each in enumerate(group)]
        return [each for _, each in sorted(places, key=lambda place: place[0])]

    def expect(self, sub_groups: Sequence[SubGroup]) -> None:
        """Start reading ahead blocks and gradients of these sub-groups, which will be stepped in this order."""
        self._cache.expect(())  # what could not be read ahead for an earlier step is read again
        self._gradients.expect(())
        self._upcoming = list(sub_groups)
        self._leave_room_for(sub_groups)
        self._cache.expect(self._coming())
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
                self._cache.drop_clean()  # the first step makes the states in ordinary memory, beside the block
                self._cache.raise_failure()
                self._create(sub_group, self._planner.block_bytes(sub_group))
            else:
                self._cache.acquire([self._block_of(sub_group)], then=self._coming())
        self._io.record_ended()
        inputs = self._gradients.take(sub_group)
        self._gradients.expect(self._upcoming)
        return inputs

    def step(self, sub_group: SubGroup, inputs: StepInputs, groups: Sequence[dict[str, Any]]) -> BlockTensors | None:
        """Step a sub-group that :meth:`load` has loaded, and return the tensors that :meth:`write_behind` takes.

        Call with interrupts deferred. Raises what the optimizer raises. The states on the drive are then unchanged but, as with
        any torch optimizer, parameters may be partly stepped, and so may the states of a resident sub-group.
        """
        block, first = self._blocks[sub_group], sub_group.layout is None
        restore = sub_group.snapshot()
        try:
            with self._io.times.computing:
                return sub_group.step(None if first else block.content, *inputs, groups)
        except BaseException:
            restore()
            if first or block.state is State.CLEAN:
                self._cache.reject([block])
                self._blocks.pop(sub_group, None)
            raise

    def write_behind(self, sub_group: SubGroup, made: BlockTensors | None) -> None:
        """Start writing the states of a sub-group that was stepped, unless it is resident. Call with interrupts deferred.

        Args:
            sub_group: The sub-group.
            made: State tensors that do not fit into the sub-group's block, as :meth:`step` returns them; None if all fit.

        Raises:
            OSError: From an earlier write.
            OutOfBuffers: If there is no memory for a new block. In both cases ``made`` is kept for :meth:`write_again`.
        """
        if made is None:
            self._release(sub_group)
        else:
            self._unplaced[sub_group] = made
            self._place_made(sub_group)
            made.clear()  # frees the tensors, since the caller still has the list
            trim_heap()
        self._cache.poll()  # a write may have ended during the step: its memory is for the next read
        self._io.record_ended()

    def drain(self) -> None:
        """Wait for all transfers. Raises the OSError of the first write that failed; its block stays in memory."""
        with self._io.times.waiting:
            self._cache.drain()
        self._io.record_ended()
        self._cache.raise_failure()

    def write_again(self) -> None:
        """Write the blocks whose writes have failed once more, to another version, and wait until they are written.

        Raises:
            OSError: If a write fails again.
            OutOfBuffers: If there is no memory for a new block.
        """
        with self._io.times.waiting:
            self._cache.drain()  # a write may be under way yet that fails
            failed = {each: block for each, block in self._blocks.items() if block.state is State.DIRTY and not block.resident}
            for sub_group, block in failed.items():
                self._place(sub_group, block)  # a disk that was full has room where no state dict is mapped any more
            self._cache.flush(failed.values())
            for sub_group in list(self._unplaced):
                with defer_interrupts():
                    self._place_made(sub_group)

    def end_uses(self) -> None:
        """End the use of a block that was loaded but not stepped, after an exception."""
        empty = [each for each in self._blocks if each.layout is None]
        self._cache.reject([self._blocks.pop(each) for each in empty])
        self._cache.end_uses()

    def commit(self, sub_groups: Sequence[SubGroup]) -> None:
        """End a step. The blocks of newly chosen residents are dropped, and get memory of their own when they are read next."""
        self._upcoming.clear()
        chosen = [each for each in sub_groups if each.in_memory and each in self._blocks and not self._blocks[each].resident]
        self._cache.reject([self._blocks.pop(each) for each in chosen])
        self._in_flight = BLOCKS_IN_FLIGHT

    # -- outside a step

    def write_resident(self, sub_group: SubGroup) -> None:
        """Write a resident sub-group's block to the drive, so that a state dict can map it. Blocks.

        Does nothing if the drive has these states already. Raises OSError; the states then stay in memory, and the next call
        writes them again.
        """
        block = self._blocks.get(sub_group)
        if block is not None and block.state in (State.DIRTY, State.WRITING):
            if block.state is State.DIRTY:
                self._place(sub_group, block)
            with self._io.aside():
                self._cache.flush([block])

    def store(self, sub_group: SubGroup, tensors: BlockTensors) -> None:
        """Write ``tensors`` as the sub-group's next version, beside the current one, and wait for the write. Raises OSError."""
        layout = sub_group.lay_out(tensors)
        number = self._versions.next_of(sub_group)
        with self._pool.lease(max(layout.nbytes, 1)) as lease:
            content = lease.buffer[: layout.nbytes]
            layout.fill(content, [tensor for _, _, tensor in tensors])
            self._io.put(block_name(sub_group, number), content).result()
        sub_group.set_current_block(number)

    def drop_clean(self) -> None:
        """Drop clean blocks, whose bytes are also on the drive, from memory. Waits for transfers."""
        self._cache.drop_clean()

    def clear(self) -> None:
        """Drop all blocks from memory, including those not yet written. Waits for transfers."""
        self._blocks.clear()
        self._unplaced.clear()
        self._upcoming.clear()
        self._cache.clear()

    # -- blocks, and the memory for them

    def _leave_room_for(self, sub_groups: Sequence[SubGroup]) -> None:
        """Set the memory limit so that blocks of these sub-groups fit.

        The first step of a sub-group makes its states in ordinary memory. To take no more memory than other steps, such a step
        has only one block in flight.
        """
        if any(each.layout is None for each in sub_groups):
            self._in_flight = 1
        self._largest = max([self._largest, *map(self._planner.block_bytes, sub_groups)])
        self._memory.set_limit(self._in_flight * self._largest)

    def _coming(self) -> list[Use]:
        """Return the next expected uses of blocks that have to be read, at most as many as can be in memory."""
        blocks = (self._block_of(each) for each in self._upcoming if each.layout is not None)
        wanted = (block for block in blocks if not (block.resident and block.in_memory))
        return [Use(block) for block, _ in zip(wanted, range(BLOCKS_IN_FLIGHT), strict=False)]

    def _block_of(self, sub_group: SubGroup) -> StoredBlock:
        """Return the block of a sub-group that has a layout."""
        if sub_group not in self._blocks:
            assert sub_group.layout is not None
            block = StoredBlock(block_name(sub_group), sub_group.layout.nbytes, 1 if sub_group.in_memory else self._largest)
            self._cache.keep({block: bool(sub_group.in_memory)})
            self._blocks[sub_group] = block
        return self._blocks[sub_group]

    def _create(self, sub_group: SubGroup, nbytes: int) -> StoredBlock:
        """Begin a use of a new block for a sub-group, with memory for ``nbytes`` bytes. May wait for memory."""
        name = block_name(sub_group, self._versions.next_of(sub_group))
        block = StoredBlock(name, nbytes, 1 if sub_group.in_memory else self._largest)
        self._cache.keep({block: bool(sub_group.in_memory)})
        self._blocks[sub_group] = block  # before there is memory: an interrupt leaves no block that nobody knows
        self._cache.create(block)
        return block

    def _place_made(self, sub_group: SubGroup) -> None:
        """Copy state tensors that a step has made to a block with a layout for them, and release it for writing.

        The tensors may lie in the sub-group's previous block.
        """
        made, before = self._unplaced[sub_group], self._blocks.get(sub_group)
        first = sub_group.layout is None
        layout = sub_group.lay_out(made)
        self._leave_room_for([sub_group])
        if before is not None and first and layout.nbytes <= before.nbytes:
            block = before
            block.set_content_bytes(layout.nbytes)
        else:
            try:
                block = self._create(sub_group, layout.nbytes)
            except BaseException:
                self._unplaced[sub_group] = [(index, key, tensor.clone()) for index, key, tensor in made]
                self._cache.reject([each for each in (before, self._blocks.pop(sub_group, None)) if each is not None])
                raise
        layout.fill(block.content, [tensor for _, _, tensor in made])
        if before is not None and before is not block:
            self._cache.reject([before])
        del self._unplaced[sub_group]
        self._release(sub_group)

    def _release(self, sub_group: SubGroup) -> None:
        """End the use of a block that was stepped, which starts its write to the next version unless it is resident."""
        block = self._blocks[sub_group]
        if block.resident:
            sub_group.set_current_block(None)
        else:
            self._place(sub_group, block)
        self._cache.release([block], changed=True)

    def _place(self, sub_group: SubGroup, block: StoredBlock) -> None:
        """Choose the version that the next write of the sub-group's block goes to."""
        sub_group.set_current_block(self._versions.next_of(sub_group))
        block.rename(block_name(sub_group))
