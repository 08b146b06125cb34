"""One step over sub-groups whose blocks lie on the drive: read ahead of the step, written behind it, undone if anything fails."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from deepnvme.memory.growable import GrowableLease
from deepnvme.memory.host import give_back_heap
from deepnvme.memory.pool import BufferPool
from deepnvme.store.futures import StoreFuture

from .gradients import SubGroupGradients
from .io_stats import IOStats
from .resident_sub_groups import RING, BlockVersions, block_name, image_name
from .sub_group import MASTER, BlockLayout, BlockSection, Held, SubGroup

POLL_SECONDS = 0.0005
"""Between looks at a read while a write may make room for the next: well below the 5 ms that the smallest useful block takes."""


class _Slot:
    """Memory for one sub-group in flight, and the transfers of it. The pipeline decides which sub-group gets it, and when."""

    def __init__(self, traffic: IOStats, pool: BufferPool) -> None:
        self._traffic, self._pool = traffic, pool
        self._block, self._images = GrowableLease(pool), GrowableLease(pool)
        self.holds: SubGroup | None = None
        """The sub-group whose block or images are here; as the block is on the drive, or is being read or written."""
        self.content: torch.Tensor | None = None
        """The bytes of its block. None if it has none yet."""
        self.reading: StoreFuture[torch.Tensor] | None = None
        self.writing: list[StoreFuture[int]] = []

    @property
    def nbytes(self) -> int:
        """Bytes of memory leased."""
        return self._block.nbytes + self._images.nbytes

    @property
    def busy(self) -> bool:
        """Whether a transfer is under way. Raises the OSError of a write that has ended."""
        for future in [each for each in self.writing if each.done()]:
            future.result()
            self.writing.remove(future)
        return self.reading is not None or bool(self.writing)

    def start_read(self, sub_group: SubGroup) -> None:
        """Start reading a sub-group's block, in place of what was here."""
        self.empty()
        if sub_group.layout is not None:
            content = self._block.take(sub_group.layout.nbytes)
            self.reading = self._traffic.get(block_name(sub_group), content)
            self.content = content
        self.holds = sub_group

    def start_write(self, name: str, content: torch.Tensor | None) -> None:
        """Start writing bytes of this slot, if there are any."""
        if content is not None:
            self.writing.append(self._traffic.put(name, content))

    def end_transfers(self) -> list[BaseException]:
        """Wait for all transfers, and return the errors of those that failed. If the read failed, the slot is empty."""
        errors = []
        if self.reading is not None:
            errors.append(self.reading.exception())
            self.reading = None
            if errors[-1] is not None:
                self.empty()
        errors += [future.exception() for future in self.writing]
        self.writing = []
        return [error for error in errors if error is not None]

    def empty(self) -> None:
        """Forget what is here, so that it is read again. The memory is kept."""
        self.holds = self.content = None

    def lay_out(self, sub_group: SubGroup, held: Held) -> None:
        """Lay out a new block for these tensors, which may lie in the old one, and copy them there."""
        before, self._block = self._block, GrowableLease(self._pool)
        layout = sub_group.lay_out(held)
        self.content = self._block.take(layout.nbytes)
        layout.fill(self.content, [tensor for _, _, tensor in held])
        self.holds = sub_group
        before.release()

    def copy_params(self, sub_group: SubGroup, layout: BlockLayout) -> torch.Tensor | None:
        """Copy parameters as they are before a step. Returns the copies' bytes; None if there is nothing to copy."""
        if not layout.sections:
            return None
        images = self._images.take(layout.nbytes)
        pieces = [sub_group.pieces[section.piece] for section in layout.sections]
        layout.fill(images, [piece.of(piece.param) for piece in pieces])
        return images

    def copy_block(self, sub_group: SubGroup, block: torch.Tensor) -> torch.Tensor:
        """Copy a block that stays in memory, as it is before a step, and return the copy. It is not the slot's content."""
        copy = self._block.take(block.nbytes).copy_(block)
        self.holds = sub_group  # whose images are found by that
        return copy

    def hand_over_images(self) -> GrowableLease:
        """Return the memory of the copies of parameters, which is the caller's from now on, and forget what is here."""
        images, self._images = self._images, GrowableLease(self._pool)
        self.empty()
        return images

    def commit(self) -> None:
        """Release the copies of parameters: they are not needed any more."""
        if self.content is None:  # it held a copy of a block
            self.holds = None
        self._images.release()

    def release(self) -> None:
        """Release all memory. A transfer that is under way keeps its own until it has ended."""
        self.empty()
        self._block.release()
        self._images.release()


@dataclass(eq=False)
class _Stepped:
    """A sub-group that was stepped, and what brings it back."""

    sub_group: SubGroup
    forget: Callable[[], None]
    """Undoes the changes to what is kept in memory."""
    images: BlockLayout
    """Of the copies of its parameters that its block alone cannot bring back."""
    kept: GrowableLease | None = None
    """Where these copies are in memory, once it is being undone. None: on the drive."""
    undoing_failed: bool = False
    """Whether undoing it has failed before. If so, a parameter that was changed since was changed by other code."""
    changed: set[int] = field(default_factory=set)
    """Pieces whose parameter other code has changed since undoing failed: it has loaded a model, say, and that stays."""

    def begin_undoing(self, images: GrowableLease | None) -> None:
        """Look which parameters other code has changed; and use these images, as those on the drive may be torn.

        To be called before any parameter is brought back.
        """
        self.kept = images or self.kept
        if self.undoing_failed:
            self.changed |= self.sub_group.changed_pieces()

    def could_not_be_undone(self) -> None:
        """Record that undoing has failed. To be called when no parameter is brought back any more, until the next attempt."""
        self.undoing_failed = True
        self.sub_group.remember_params()


class SubGroupPipeline:
    """Makes the step of sub-groups whose blocks are on the drive: :meth:`step` each, then :meth:`commit`, or :meth:`undo` all.

    A step never overwrites the block that it has read: each sub-group has two on the drive, that of the last completed step and
    the one being written.

    Args:
        traffic: Reads and writes blocks.
        blocks: Chooses the block that is written.
        gradients: Provides the gradients. They are read ahead, too.
        pool: Where memory is leased.
    """

    def __init__(self, traffic: IOStats, blocks: BlockVersions, gradients: SubGroupGradients, pool: BufferPool) -> None:
        self._traffic, self._blocks, self._gradients, self._pool = traffic, blocks, gradients, pool
        self._slots = [_Slot(traffic, pool) for _ in range(RING)]
        self._usable = RING
        self._read_only = GrowableLease(pool)
        self._log: list[_Stepped] = []
        self._upcoming: list[SubGroup] = []

    @property
    def leased_bytes(self) -> int:
        """Bytes of memory that are leased for the sub-groups in flight."""
        return self._read_only.nbytes + sum(slot.nbytes for slot in self._slots)

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
        kept = {slot.holds for slot in self._slots}
        half = len(sub_groups) // 2
        front = sum(sub_group in kept for sub_group in sub_groups[:half])
        back = sum(sub_group in kept for sub_group in sub_groups[half:])
        order = list(sub_groups if front >= back else reversed(sub_groups))
        for slot in self._slots:
            if slot.holds is not None and slot.holds.in_memory:  # it is stepped in its resident block from now on
                slot.empty()
        self._upcoming = list(order)
        self._leave_room_for_new_states(order)
        self._read_ahead()
        return order

    def step(self, sub_group: SubGroup, groups: Sequence[dict[str, Any]]) -> None:
        """Step a sub-group, and start writing its block. Reads it first, unless it was read ahead.

        Raises OSError from any transfer since the last commit.
        """
        if sub_group in self._upcoming:
            self._upcoming.remove(sub_group)
        self._leave_room_for_new_states([sub_group])  # not all that backward completes was expected
        slot = self._slot_of(sub_group)
        layout = sub_group.image()
        images = slot.copy_params(sub_group, layout)
        self._log.append(_Stepped(sub_group, sub_group.remember(), layout))
        collected, scratch = self._gradients.take(sub_group)
        with self._traffic.times.computing:
            held = sub_group.step(slot.content, collected, scratch, groups)
            if held is not None:
                slot.lay_out(sub_group, held)
                del held
                give_back_heap()
        sub_group.current_states_are_in(self._blocks.next_of(sub_group))
        slot.start_write(block_name(sub_group), slot.content)
        slot.start_write(image_name(sub_group), images)
        self._read_ahead()

    def keep_copy(self, sub_group: SubGroup) -> None:
        """Have :meth:`undo` bring back a resident sub-group, too, which is about to be stepped in memory. Takes a slot."""
        slot, lease = self._free_slot(), sub_group.resident
        assert lease is not None
        slot.empty()
        layout = sub_group.image()
        slot.copy_params(sub_group, layout)
        copy = slot.copy_block(sub_group, lease.buffer)
        forget = sub_group.remember()

        def bring_back() -> None:
            forget()
            lease.buffer.copy_(copy)
            sub_group.came_to_memory(lease)  # it has another, if its states have changed their form

        self._log.append(_Stepped(sub_group, bring_back, layout))

    def write_now(self, sub_group: SubGroup, held: Held) -> None:
        """Make ``held`` the sub-group's next block, and wait until it is on the drive."""
        slot = self._free_slot()
        slot.lay_out(sub_group, held)
        sub_group.current_states_are_in(self._blocks.next_of(sub_group))
        slot.start_write(block_name(sub_group), slot.content)
        self.drain()

    # -- the end of a step

    def drain(self) -> None:
        """Wait for all transfers. Raises the OSError of the first that failed."""
        self._end_transfers(self._slots)

    def commit(self) -> None:
        """End a step that was made. Nothing may be under way."""
        self._log.clear()
        self._upcoming.clear()
        for slot in self._slots:
            slot.commit()
        if self._usable < len(self._slots):
            self._pool.trim()  # what was for images
            self._usable = len(self._slots)

    def undo(self) -> None:
        """Bring parameters and states back to where the last commit left them.

        Raises what came first, when all has been tried, if some could not be brought back: these stay in :attr:`stepped`, and
        another call tries them again.
        """
        with contextlib.suppress(Exception):
            self.drain()
        self._upcoming.clear()
        self._usable = len(self._slots)
        for stepped in self._log:
            slot = self._holding(stepped.sub_group)
            stepped.begin_undoing(None if slot is None else slot.hand_over_images())
        for slot in self._slots:  # before anything is read: undoing takes no more memory than stepping
            slot.release()  # a transfer that was interrupted before it was noted still has the memory
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
        self._read_only.release()
        if failed is not None:
            raise failed

    def give_up(self) -> int:
        """Undo no more: other states take the place of what was stepped.

        Returns:
            How many parameters stay stepped, less those that other code has changed meanwhile.
        """
        stepped: set[torch.Tensor] = set()
        for each in self._log:
            each.begin_undoing(None)
            stepped |= {piece.param for index, piece in enumerate(each.sub_group.pieces) if index not in each.changed}
        self._log.clear()
        return len(stepped)

    def abandon(self) -> None:
        """Wait for all transfers, however they end, and have what is on the drive read again."""
        with contextlib.suppress(OSError):
            self.drain()
        for slot in self._slots:
            slot.empty()

    def release(self) -> None:
        """Wait for all transfers, however they end, and release all memory."""
        self.abandon()
        for slot in self._slots:
            slot.release()

    # -- which sub-group gets which slot

    def _leave_room_for_new_states(self, sub_groups: Sequence[SubGroup]) -> None:
        """Use a single slot if states are new: their step has them, and weights to go beside them, in memory of their own too."""
        if any(sub_group.layout is None for sub_group in sub_groups):
            self._usable = 1

    def _holding(self, sub_group: SubGroup) -> _Slot | None:
        return next((slot for slot in self._slots if slot.holds is sub_group), None)

    def _slot_of(self, sub_group: SubGroup) -> _Slot:
        """Return the slot that has the sub-group's block, of which no transfer is under way any more. Waits for them."""
        slot = self._holding(sub_group)
        if slot is None:
            slot = self._free_slot()
            slot.start_read(sub_group)
        self._until_read(slot)
        return slot

    def _read_ahead(self) -> None:
        for sub_group in self._upcoming:
            if self._holding(sub_group) is None:
                slot = self._idle_slot()
                if slot is None:
                    break
                slot.start_read(sub_group)
        self._gradients.expect(self._upcoming)

    def _idle_slot(self) -> _Slot | None:
        idle = [slot for slot in self._slots[: self._usable] if not slot.busy and slot.holds not in self._upcoming]
        return min(idle, key=lambda slot: slot.holds is not None, default=None)

    def _free_slot(self) -> _Slot:
        while (slot := self._idle_slot()) is None:
            written = [slot for slot in self._slots if slot.writing]
            if written:
                self._end_transfers(written[:1])
            else:  # all were read ahead of their turn, and another is asked for
                last = max(self._slots, key=self._turn)
                self._until_read(last)
                last.empty()
        return slot

    def _turn(self, slot: _Slot) -> int:
        return self._upcoming.index(slot.holds) if slot.holds is not None and slot.holds in self._upcoming else -1

    def _until_read(self, slot: _Slot) -> None:
        """Wait for a slot's transfers, and begin to read into others as soon as these become free."""
        with self._traffic.times.waiting:
            while slot.reading is not None and not slot.reading.done():
                self._read_ahead()
                with contextlib.suppress(TimeoutError):
                    slot.reading.exception(POLL_SECONDS)
        self._end_transfers([slot])

    def _end_transfers(self, slots: Sequence[_Slot]) -> None:
        """Wait for all transfers of these slots. Raises the OSError of the first that failed."""
        with self._traffic.times.waiting:
            errors = [error for slot in slots for error in slot.end_transfers()]
        if errors:
            raise errors[0]
        self._traffic.look()

    # -- undoing

    def _restore(self, stepped: _Stepped) -> None:
        sub_group, layout, changed = stepped.sub_group, stepped.images, stepped.changed
        sub_group.mark_stale(changed)
        if layout.sections:
            if stepped.kept is not None:
                images = stepped.kept.take(layout.nbytes)
            else:
                images = self._read_only.take(layout.nbytes)
                self._traffic.store.get(image_name(sub_group), images).result()
            _copy_back(sub_group, [section for section in layout.sections if section.piece not in changed], images)
        imaged = {section.piece for section in layout.sections}
        sections = sub_group.layout.sections if sub_group.layout is not None else ()
        masters = [section for section in sections if section.key == MASTER and section.piece not in imaged | changed]
        if sub_group.layout is not None and masters:
            content = self._read_only.take(sub_group.layout.nbytes)
            self._traffic.store.get(block_name(sub_group), content).result()
            _copy_back(sub_group, masters, content)


def _copy_back(sub_group: SubGroup, sections: Sequence[BlockSection], content: torch.Tensor) -> None:
    """Copy sections of a block, or of images, to the parameters they belong to."""
    for section in sections:
        piece = sub_group.pieces[section.piece]
        piece.of(piece.param).copy_(section.of(content))
