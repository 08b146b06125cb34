"""One step over sub-groups whose blocks lie on the drive: read ahead of the step, written behind it, undone if anything fails."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from deepnvme.memory.host import give_back_heap

from .block_layout import BlockLayout, BlockSection
from .block_versions import BlockVersions, block_name, image_name
from .param_versions import version_of
from .slots import GrowableLease, SubGroupSlot
from .sub_group import MASTER, Held, SubGroup

if TYPE_CHECKING:
    import torch

    from deepnvme.memory.pool import BufferPool

    from .io_stats import IOStats
    from .step_gradients import StepGradients

POLL_SECONDS = 0.0005
"""Between looks at a read while a write may make room for the next: well below the 5 ms that the smallest useful block takes."""


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
    versions: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Piece -> version of its parameter when undoing it last failed."""
    changed: set[int] = field(default_factory=set)
    """Pieces whose parameter others have changed since: they have loaded a model, say, and it stays."""

    def look_for_changes(self) -> None:
        """To be called before any parameter is brought back."""
        pieces = self.sub_group.pieces
        self.changed |= {index for index, seen in self.versions.items() if version_of(pieces[index].param) != seen}

    def remember_versions(self) -> None:
        """To be called when no parameter will be brought back any more, until later."""
        self.versions = {index: version_of(piece.param) for index, piece in enumerate(self.sub_group.pieces)}


class SubGroupPipeline:
    """``step`` each sub-group, then ``commit``, or ``undo`` all.

    A step never overwrites the block that it has read: each sub-group has two on the drive, that of the last whole step and
    the one being written.
    """

    def __init__(self, traffic: IOStats, blocks: BlockVersions, gradients: StepGradients, pool: BufferPool, slots: int) -> None:
        self._traffic = traffic
        self._blocks = blocks
        self._gradients = gradients
        self._pool = pool
        self._slots = [SubGroupSlot(GrowableLease(pool), GrowableLease(pool)) for _ in range(slots)]
        self._usable = slots
        self._read_only = GrowableLease(pool)
        self._log: list[_Stepped] = []
        self._upcoming: list[SubGroup] = []

    @property
    def under_way(self) -> bool:
        """Whether something was stepped that is neither committed nor undone."""
        return bool(self._log)

    def kept_first(self, order: Sequence[SubGroup]) -> list[SubGroup]:
        """The order in which what is still in memory comes first: this one, or its reverse."""
        kept = {slot.holds.index for slot in self._slots if slot.holds is not None}
        half = len(order) // 2
        front = sum(sub_group.index in kept for sub_group in order[:half])
        back = sum(sub_group.index in kept for sub_group in order[half:])
        return list(order) if front >= back else list(reversed(order))

    def expect(self, order: Sequence[SubGroup]) -> None:
        """What is to be stepped next, in this order: it is read ahead."""
        for slot in self._slots:
            if slot.holds is not None and slot.holds.in_memory:  # and is stepped there from now on
                slot.holds = slot.content = None
        self._upcoming = list(order)
        self._leave_room_for_new_states(order)
        self._read_ahead()

    def step(self, sub_group: SubGroup, groups: Sequence[dict[str, Any]]) -> None:
        """Read it if that was not begun, step it, begin to write it. Raises OSError from any transfer of this sweep."""
        if sub_group in self._upcoming:
            self._upcoming.remove(sub_group)
        self._leave_room_for_new_states([sub_group])  # not all that backward completes was expected
        slot = self._slot_of(sub_group)
        self._until_read(slot)
        taken = sub_group.image()
        images = self._take_images(slot, sub_group, taken)
        self._log.append(_Stepped(sub_group, sub_group.remember(), taken))
        self._gradients.fetch(sub_group)
        with self._traffic.spending("computing"):
            held = sub_group.step(slot.content, self._gradients.of(sub_group), groups)
            if held is not None:
                slot.content = self._laid_out(sub_group, slot, held)
                del held
                give_back_heap()
        sub_group.current = self._blocks.next_of(sub_group)
        self._write(slot, block_name(sub_group), slot.content)
        self._write(slot, image_name(sub_group), images)
        self._read_ahead()

    def keep_copy(self, sub_group: SubGroup) -> None:
        """Have :meth:`undo` bring this one back too, which is about to be stepped in memory. Takes a slot."""
        slot, lease = self._free_slot(), sub_group.resident
        assert lease is not None
        slot.holds = slot.content = None
        taken = sub_group.image()
        self._take_images(slot, sub_group, taken)
        copy = slot.block.take(lease.nbytes).copy_(lease.buffer)
        forget = sub_group.remember()

        def bring_back() -> None:
            forget()
            lease.buffer.copy_(copy)
            sub_group.resident = lease  # it has another, if its states have changed their form

        slot.holds = sub_group  # whose images are found by that
        self._log.append(_Stepped(sub_group, bring_back, taken))

    def drain(self) -> None:
        """Wait for all transfers. Raises the OSError of the first that failed."""
        errors = []
        for slot in self._slots:
            if slot.reading is not None:
                with self._traffic.spending("waiting"):
                    errors.append(slot.reading.exception())
                slot.reading = None
                if errors[-1] is not None:
                    slot.holds = slot.content = None
            with self._traffic.spending("waiting"):
                errors += [future.exception() for future in slot.writing]
            slot.writing = []
        for error in errors:
            if error is not None:
                raise error
        self._traffic.look()

    def commit(self) -> None:
        """The step has been made. Nothing may be under way."""
        self._log.clear()
        self._upcoming.clear()
        for slot in self._slots:
            if slot.content is None:  # it held a copy
                slot.holds = None
            slot.image.release()
        if self._usable < len(self._slots):
            self._pool.trim()  # what was for images
            self._usable = len(self._slots)

    def undo(self) -> None:
        """Bring parameters and states back to where the last commit left them.

        Raises what came first, when all has been tried, if some could not be brought back: these stay under way, and another call
        tries them again.
        """
        with contextlib.suppress(Exception):
            self.drain()
        self._upcoming.clear()
        self._usable = len(self._slots)
        for stepped in self._log:
            slot = next((slot for slot in self._slots if slot.holds is stepped.sub_group), None)
            if slot is not None:  # what is written of the copies may be torn
                stepped.kept, slot.image = slot.image, GrowableLease(self._pool)
                slot.holds = None
            stepped.look_for_changes()
        self.forget()
        for slot in self._slots:  # undoing takes no more memory than stepping
            slot.block.release()
            slot.image.release()  # a transfer that was interrupted before it was noted still has the memory
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
            stepped.remember_versions()
        self._read_only.release()
        if failed is not None:
            raise failed

    def give_up(self) -> int:
        """Undo no more: other states take the place of what was stepped. Returns how many parameters stay stepped, less those
        that others have changed meanwhile."""
        stepped: set[torch.Tensor] = set()
        for each in self._log:
            each.look_for_changes()
            stepped |= {piece.param for index, piece in enumerate(each.sub_group.pieces) if index not in each.changed}
        self._log.clear()
        return len(stepped)

    def forget(self) -> None:
        """Have what is on the drive read again."""
        for slot in self._slots:
            slot.holds = slot.content = None

    def abandon(self) -> None:
        """Wait for what is under way, however it ends, and forget it."""
        with contextlib.suppress(OSError):
            self.drain()
        self.forget()

    def release(self) -> None:
        """The same, and give all memory back."""
        self.abandon()
        for slot in self._slots:
            slot.block.release()
            slot.image.release()

    def write_now(self, sub_group: SubGroup, held: Held) -> None:
        """Make ``held`` the sub-group's next block, and wait until it is on the drive."""
        slot = self._free_slot()
        slot.content = self._laid_out(sub_group, slot, held)
        slot.holds = sub_group
        sub_group.current = self._blocks.next_of(sub_group)
        self._write(slot, block_name(sub_group), slot.content)
        self.drain()

    def _leave_room_for_new_states(self, sub_groups: Sequence[SubGroup]) -> None:
        """A step that makes states has them, and weights to go beside them, in memory of their own as well."""
        if any(sub_group.layout is None for sub_group in sub_groups):
            self._usable = 1

    def _slot_of(self, sub_group: SubGroup) -> SubGroupSlot:
        slot = next((slot for slot in self._slots if slot.holds is sub_group), None)
        if slot is None:
            slot = self._free_slot()
            self._read(slot, sub_group)
        elif slot.writing:
            self._until_written(slot)
        return slot

    def _read(self, slot: SubGroupSlot, sub_group: SubGroup) -> None:
        slot.holds = slot.content = None
        if sub_group.layout is not None:
            content = slot.block.take(sub_group.layout.nbytes)
            slot.reading = self._traffic.get(block_name(sub_group), content)
            slot.content = content
        slot.holds = sub_group

    def _write(self, slot: SubGroupSlot, name: str, content: torch.Tensor | None) -> None:
        if content is not None:
            slot.writing.append(self._traffic.put(name, content))

    def _read_ahead(self) -> None:
        for sub_group in self._upcoming:
            if any(slot.holds is sub_group for slot in self._slots):
                continue
            slot = self._idle_slot()
            if slot is None:
                break
            self._read(slot, sub_group)
        self._gradients.expect(self._upcoming)

    def _idle_slot(self) -> SubGroupSlot | None:
        idle = [slot for slot in self._slots[: self._usable] if not slot.busy and slot.holds not in self._upcoming]
        return min(idle, key=lambda slot: slot.holds is not None, default=None)

    def _free_slot(self) -> SubGroupSlot:
        while (slot := self._idle_slot()) is None:
            busy = [slot for slot in self._slots if slot.writing]
            if busy:
                self._until_written(busy[0])
            else:  # all were read ahead of their turn, and another is asked for
                last = max(self._slots, key=self._turn)
                self._until_read(last)
                last.holds = last.content = None
        return slot

    def _turn(self, slot: SubGroupSlot) -> int:
        return self._upcoming.index(slot.holds) if slot.holds is not None and slot.holds in self._upcoming else -1

    def _until_read(self, slot: SubGroupSlot) -> None:
        if slot.reading is None:
            return
        with self._traffic.spending("waiting"):
            while not slot.reading.done():
                self._read_ahead()
                with contextlib.suppress(TimeoutError):
                    slot.reading.result(POLL_SECONDS)
            reading, slot.reading = slot.reading, None
            try:
                reading.result()
            except OSError:
                slot.holds = slot.content = None
                raise
        self._traffic.look()

    def _until_written(self, slot: SubGroupSlot) -> None:
        with self._traffic.spending("waiting"):
            while slot.writing:
                slot.writing[0].result()
                slot.writing.pop(0)
        self._traffic.look()

    def _take_images(self, slot: SubGroupSlot, sub_group: SubGroup, layout: BlockLayout) -> torch.Tensor | None:
        if not layout.sections:
            return None
        images = slot.image.take(layout.nbytes)
        for section in layout.sections:
            piece = sub_group.pieces[section.piece]
            section.of(images).copy_(piece.of(piece.param))
        return images

    def _laid_out(self, sub_group: SubGroup, slot: SubGroupSlot, held: Held) -> torch.Tensor:
        before, slot.block = slot.block, GrowableLease(self._pool)  # what is held may lie in it
        layout = sub_group.lay_out(held)
        content = slot.block.take(layout.nbytes)
        for section, (_, _, tensor) in zip(layout.sections, held, strict=True):
            section.of(content).copy_(tensor)
        before.release()
        return content

    def _restore(self, stepped: _Stepped) -> None:
        sub_group, taken, changed = stepped.sub_group, stepped.images, stepped.changed
        sub_group.stale |= {index for index in changed if sub_group.masters[index]}
        if taken.sections:
            if stepped.kept is not None:
                images = stepped.kept.take(taken.nbytes)
            else:
                images = self._read_only.take(taken.nbytes)
                self._traffic.store.get(image_name(sub_group), images).result()
            _copy_back(sub_group, [section for section in taken.sections if section.piece not in changed], images)
        imaged = {section.piece for section in taken.sections}
        sections = sub_group.layout.sections if sub_group.layout is not None else ()
        masters = [section for section in sections if section.key == MASTER and section.piece not in imaged | changed]
        if sub_group.layout is not None and masters:
            content = self._read_only.take(sub_group.layout.nbytes)
            self._traffic.store.get(block_name(sub_group), content).result()
            _copy_back(sub_group, masters, content)


def _copy_back(sub_group: SubGroup, sections: Sequence[BlockSection], content: torch.Tensor) -> None:
    for section in sections:
        piece = sub_group.pieces[section.piece]
        piece.of(piece.param).copy_(section.of(content))
