"""One step over sub-groups whose blocks lie on the drive: read ahead of the step, written behind it, undone if anything fails."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from deepnvme.memory.host import give_back_heap
from deepnvme.memory.pool import BufferPool
from deepnvme.transfer.block_cache import BlockCache, Use
from deepnvme.transfer.block_memory import PooledMemory

from .block_versions import BlockVersions, block_name
from .counted_io import CountedIO, StoredBlock, shortage
from .gradients import SubGroupGradients
from .resident_sub_groups import RING, image_name
from .spare_memory import SpareCopy, SpareMemory
from .sub_group import MASTER, BlockLayout, BlockSection, Held, SubGroup


@dataclass(frozen=True, eq=False)
class _Copies:
    """Copies of those parameters of a sub-group that its block alone cannot bring back."""

    layout: BlockLayout
    spare: SpareCopy | None = None
    """The copies in spare memory, if they were made there."""
    images: tuple[StoredBlock, ...] = ()
    """The block of these copies, if there are any and they were made to go to the drive."""


@dataclass(eq=False)
class _Stepped:
    """A sub-group that was stepped, and what brings it back."""

    sub_group: SubGroup
    forget: Callable[[], None]
    """Undoes the changes to what is kept in memory."""
    copies: _Copies
    undoing_failed: bool = False
    """Whether undoing it has failed before. If so, a parameter that was changed since was changed by other code."""
    changed: set[int] = field(default_factory=set)
    """Pieces whose parameter other code has changed since undoing failed: it has loaded a model, say, and that stays."""

    def look_for_changes(self) -> None:
        """Look which parameters other code has changed. To be called before any parameter is brought back."""
        if self.undoing_failed:
            self.changed |= self.sub_group.changed_pieces()

    def could_not_be_undone(self) -> None:
        """Record that undoing has failed. To be called when no parameter is brought back any more, until the next attempt."""
        self.undoing_failed = True
        self.sub_group.remember_params()


class SubGroupPipeline:
    """Makes the step of sub-groups whose blocks are on the drive: :meth:`step` each, then :meth:`commit`, or :meth:`undo` all.

    The states of a sub-group are one block. A step never overwrites the states that it has read: each sub-group has two places on
    the drive, that of the last completed step and the one being written. Copies of its parameters, to undo the step with, stay in
    memory while some is to spare and nobody else wants it. Otherwise they are another block, which is written.

    Args:
        io: Reads and writes blocks.
        blocks: Chooses where states are written.
        gradients: Provides the gradients. They are read ahead, too.
        pool: Where memory is leased.
        spare: Lends memory for copies that are not written.
    """

    def __init__(
        self, io: CountedIO, blocks: BlockVersions, gradients: SubGroupGradients, pool: BufferPool, spare: SpareMemory
    ) -> None:
        self._io, self._blocks, self._gradients, self._pool, self._spare = io, blocks, gradients, pool, spare
        self._memory, self._copies_memory = PooledMemory(pool, 0, shortage), PooledMemory(pool, 0, shortage)
        self._cache = BlockCache(io, self._memory, read_again=False)
        """The states of sub-groups."""
        self._copies = BlockCache(io, self._copies_memory, retain=False)
        """Copies of parameters that go to the drive."""
        self._states: dict[SubGroup, StoredBlock] = {}
        self._in_flight = RING
        """How many sub-groups there is memory for."""
        self._states_bytes, self._images_bytes = 1, 0
        """Memory for the states of one, and for copies of its parameters. That of all has one size, so that it is lent again."""
        self._log: list[_Stepped] = []
        self._upcoming: list[SubGroup] = []

    @property
    def leased_bytes(self) -> int:
        """Bytes of memory that are leased for the sub-groups in flight."""
        return self._cache.used + self._copies.used + self._spare.nbytes

    @property
    def stepped(self) -> list[SubGroup]:
        """The sub-groups that were stepped and are neither committed nor undone, in the order they were stepped."""
        return [each.sub_group for each in self._log]

    @property
    def under_way(self) -> bool:
        """Whether something was stepped that is neither committed nor undone."""
        return bool(self._log)

    # -- the order, and what is done with each sub-group

    def expect(self, sub_groups: Sequence[SubGroup]) -> list[SubGroup]:
        """Start reading ahead what is to be stepped next.

        Returns:
            The order in which it is read ahead: the one given or its reverse, so that what is still in memory comes first.
        """
        for sub_group in [each for each in self._states if each.in_memory]:
            self._cache.discard(self._states.pop(sub_group))  # if it leaves memory again, then to another place on the drive
        kept = {sub_group for sub_group, states in self._states.items() if states.in_memory}
        half = len(sub_groups) // 2
        front = sum(sub_group in kept for sub_group in sub_groups[:half])
        back = sum(sub_group in kept for sub_group in sub_groups[half:])
        order = list(sub_groups if front >= back else reversed(sub_groups))
        self._cache.expect(())  # what could not be read for an earlier step is read again
        self._images_bytes = 0
        self._spare.begin_step()
        self._upcoming = list(order)
        self._leave_room_for(order)
        self._cache.expect(self._coming())
        self._gradients.expect(self._upcoming)
        return order

    def step(self, sub_group: SubGroup, groups: Sequence[dict[str, Any]]) -> None:
        """Step a sub-group, and start writing its block. Reads it first, unless it was read ahead.

        Raises OSError from any transfer since the last commit.
        """
        if sub_group in self._upcoming:
            self._upcoming.remove(sub_group)
        self._leave_room_for([sub_group])  # not all that backward completes was expected
        states = self._states_of(sub_group)
        if states is None:
            with self._io.times.waiting:
                self._cache.drop_clean()
        copies = self._copy_params(sub_group)  # while the states are being read
        if states is not None:
            with self._io.times.waiting:
                self._cache.acquire([states], then=self._coming())
        self._log.append(_Stepped(sub_group, sub_group.remember(), copies))
        collected, scratch = self._gradients.take(sub_group)
        with self._io.times.computing:
            held = sub_group.step(None if states is None else states.content, collected, scratch, groups)
            if held is not None:
                self._lay_out(sub_group, held)
                del held
                give_back_heap()
        self._write(sub_group, copies.images)
        self._cache.poll()  # a write may have ended during the step: its memory is for the next read
        self._io.record_ended()
        self._gradients.expect(self._upcoming)

    def keep_copy(self, sub_group: SubGroup) -> None:
        """Have :meth:`undo` bring back a resident sub-group, too, which is about to be stepped in memory."""
        lease = sub_group.resident
        assert lease is not None
        self._cache.drop_clean()  # whose memory the copy takes
        copies = self._copy_params(sub_group)
        copy = self._pool.lease(lease.nbytes)
        copy.buffer.copy_(lease.buffer)
        forget = sub_group.remember()

        def bring_back() -> None:
            forget()
            lease.buffer.copy_(copy.buffer)
            sub_group.came_to_memory(lease)  # it has another, if its states have changed their form

        self._log.append(_Stepped(sub_group, bring_back, copies))

    def write_now(self, sub_group: SubGroup, held: Held) -> None:
        """Make ``held`` the sub-group's next block, and wait until it is on the drive."""
        self._lay_out(sub_group, held)
        self._write(sub_group, [])
        self.drain()

    # -- the end of a step

    def drain(self) -> None:
        """Wait for all transfers. Raises the OSError of the first that failed."""
        with self._io.times.waiting:
            self._cache.drain()
            self._copies.drain()
        self._io.record_ended()
        self._cache.raise_failure()
        self._copies.raise_failure()

    def commit(self) -> None:
        """End a step that was made. Nothing may be under way."""
        self._copies.clear()
        self._clear_log()
        self._upcoming.clear()
        if self._in_flight < RING:
            self._pool.trim()  # what was for images
            self._in_flight = RING

    def undo(self) -> None:
        """Bring parameters and states back to where the last commit left them.

        Raises what came first, when all has been tried, if some could not be brought back: these stay in :attr:`stepped`, and
        another call tries them again.
        """
        self.abandon()  # before anything is read: undoing takes no more memory than stepping
        self._in_flight = RING
        for stepped in self._log:
            stepped.look_for_changes()
        failed: Exception | None = None
        for stepped in list(reversed(self._log)):
            stepped.forget()
            try:
                self._restore(stepped)
            except Exception as error:
                failed = failed or error
            else:
                self._log.remove(stepped)
        for stepped in self._log:
            stepped.could_not_be_undone()
        if not self._log:
            self._spare.take_back()
        self.abandon()
        self._io.count_written(self._spare.pop_written())
        if failed is not None:
            raise failed

    def give_up(self) -> int:
        """Undo no more: other states take the place of what was stepped.

        Returns:
            How many parameters stay stepped, less those that other code has changed meanwhile.
        """
        stepped: set[torch.Tensor] = set()
        for each in self._log:
            each.look_for_changes()
            stepped |= {piece.param for index, piece in enumerate(each.sub_group.pieces) if index not in each.changed}
        self._clear_log()
        return len(stepped)

    def forget_states(self) -> None:
        """Read the states of every sub-group again, from where its current ones are. Never blocks."""
        self._states.clear()

    def abandon(self) -> None:
        """Wait for all transfers, however they end, and release all memory: what is on the drive is read again.

        Copies of parameters that are in memory stay there while a step may have to be undone: on the drive they may be torn.
        """
        self.forget_states()  # first: an interrupt of the waiting leaves none of them to be used
        self._upcoming.clear()
        self._cache.clear()
        self._copies.clear(keeping=[images for stepped in self._log for images in stepped.copies.images])

    def close(self) -> None:
        """Wait for all transfers, however they end, and release all memory. Nothing may be under way."""
        self.abandon()
        self._spare.release()

    # -- blocks, and the memory for them

    def _leave_room_for(self, sub_groups: Sequence[SubGroup]) -> None:
        """Make the limits of memory large enough for these.

        The first step of a sub-group makes its states in ordinary memory. So that this takes no more than usual, there is memory
        for a single sub-group meanwhile.
        """
        if any(sub_group.layout is None for sub_group in sub_groups):
            self._in_flight = 1
        self._states_bytes = max([self._states_bytes, *(each.layout.nbytes for each in sub_groups if each.layout is not None)])
        self._memory.set_limit(self._in_flight * self._states_bytes)
        self._copies_memory.set_limit(self._in_flight * self._images_bytes)

    def _coming(self) -> list[Use]:
        """Return which states are used next, as many as there can be memory for."""
        return [Use(states) for states in map(self._states_of, self._upcoming[:RING]) if states is not None]

    def _states_of(self, sub_group: SubGroup) -> StoredBlock | None:
        """Return the block of a sub-group's states. None if it has none yet."""
        if sub_group.layout is not None and sub_group not in self._states:
            self._states[sub_group] = StoredBlock(block_name(sub_group), sub_group.layout.nbytes, self._states_bytes)
        return self._states.get(sub_group)

    def _lay_out(self, sub_group: SubGroup, held: Held) -> None:
        """Lay out a new block for these tensors, which may lie in the old one, and copy them there. Begins a use of it."""
        before = self._states.pop(sub_group, None)
        layout = sub_group.lay_out(held)
        self._leave_room_for([sub_group])
        states = self._states_of(sub_group)
        assert states is not None
        self._cache.create(states)
        layout.fill(states.content, [tensor for _, _, tensor in held])
        if before is not None:
            self._cache.reject([before])

    def _copy_params(self, sub_group: SubGroup) -> _Copies:
        """Copy parameters as they are before a step. Begins a use of the copies' block, if they go to the drive."""
        layout = sub_group.image()
        if not layout.sections:
            return _Copies(layout)
        params = (piece.of(piece.param) for piece in (sub_group.pieces[section.piece] for section in layout.sections))
        # The first step makes the states in ordinary memory: what is to spare is for them.
        if self._in_flight == RING:
            spare = self._spare.copy(image_name(sub_group), layout.nbytes, lambda buffer: layout.fill(buffer, params))
            if spare is not None:
                return _Copies(layout, spare)
        images = self._images(sub_group, layout)
        with self._io.times.waiting:
            self._copies.create(images)
        layout.fill(images.content, params)
        return _Copies(layout, images=(images,))

    def _images(self, sub_group: SubGroup, layout: BlockLayout) -> StoredBlock:
        """Return a block for copies of a sub-group's parameters, for which there may be memory from now on."""
        self._images_bytes = max(self._images_bytes, layout.nbytes)
        self._leave_room_for([])
        return StoredBlock(image_name(sub_group), layout.nbytes, self._images_bytes)

    def _clear_log(self) -> None:
        """Forget what was stepped, and end the use of memory by copies of it."""
        self._log.clear()
        self._spare.take_back()
        self._io.count_written(self._spare.pop_written())

    def _write(self, sub_group: SubGroup, images: Sequence[StoredBlock]) -> None:
        """Start writing a sub-group's states, which are in use, to where no others are; and these copies of its parameters."""
        sub_group.current_states_are_in(self._blocks.next_of(sub_group))
        states = self._states[sub_group]
        states.rename(block_name(sub_group))
        self._cache.release([states], changed=True)
        if images:
            self._copies.release(images)

    # -- undoing

    def _restore(self, stepped: _Stepped) -> None:
        """Copy the parameters as they were before the step back to the model, but for those that other code has changed."""
        sub_group, changed = stepped.sub_group, stepped.changed
        sub_group.mark_stale(changed)
        copies = stepped.copies
        unchanged = [section for section in copies.layout.sections if section.piece not in changed]
        if copies.spare is None:
            _read_back(sub_group, unchanged, self._copies, copies.images)
        elif (in_memory := copies.spare.buffer) is not None:
            _copy_back(sub_group, unchanged, in_memory)
        else:  # somebody else wanted the memory
            _read_back(sub_group, unchanged, self._copies, [self._images(sub_group, copies.layout)])
        imaged = {section.piece for section in copies.layout.sections}
        sections = sub_group.layout.sections if sub_group.layout is not None else ()
        masters = [section for section in sections if section.key == MASTER and section.piece not in imaged | changed]
        states = self._states_of(sub_group)
        if states is not None and masters:
            _read_back(sub_group, masters, self._cache, [states])
            self._cache.drop_clean()  # undoing takes the memory of one at a time


def _read_back(sub_group: SubGroup, sections: Sequence[BlockSection], cache: BlockCache, blocks: Sequence[StoredBlock]) -> None:
    """Copy sections of a block, or of images, to the parameters they belong to, after reading them."""
    cache.acquire(blocks)
    for block in blocks:
        _copy_back(sub_group, sections, block.content)
    cache.release(blocks, write=False)


def _copy_back(sub_group: SubGroup, sections: Sequence[BlockSection], content: torch.Tensor) -> None:
    """Copy sections of these bytes to the parameters they belong to."""
    for section in sections:
        piece = sub_group.pieces[section.piece]
        piece.of(piece.param).copy_(section.of(content))
