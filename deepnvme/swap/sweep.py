"""One step over sub-groups whose blocks lie on the drive: read ahead of the step, written behind it, undone if anything fails."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .block import Layout
from .memory import give_back_heap
from .sub_group import MASTER, Gradients, Held, SubGroup

if TYPE_CHECKING:
    import torch

    from .buffers import BufferPool, Lease
    from .futures import StoreFuture
    from .store import TensorStore

POLL_SECONDS = 0.0005
"""Between looks at a read while a write may make room for the next: well below the 5 ms that the smallest useful block takes."""


class Room:
    """Leased memory that is replaced where more is needed."""

    def __init__(self, pool: BufferPool) -> None:
        self._pool = pool
        self._lease: Lease | None = None

    def take(self, nbytes: int) -> torch.Tensor:
        """So many bytes, of any content. What was taken before is gone."""
        if self._lease is None or self._lease.nbytes < nbytes:
            self.release()
            self._lease = self._pool.lease(max(nbytes, 1))
        return self._lease.buffer[:nbytes]

    def release(self) -> None:
        """Give the memory back."""
        if self._lease is not None:
            self._lease.release()
            self._lease = None


@dataclass
class Slot:
    """A place in the ring."""

    block: Room
    image: Room
    holds: SubGroup | None = None
    """Whose block, as it is on the drive or is being read or written."""
    content: torch.Tensor | None = None
    reading: StoreFuture[torch.Tensor] | None = None
    writing: list[StoreFuture[int]] = field(default_factory=list)

    @property
    def busy(self) -> bool:
        """Whether its memory is under transfer."""
        self.writing = [future for future in self.writing if not _ended(future)]
        return self.reading is not None or bool(self.writing)


@dataclass
class Times:
    """Of one step. Seconds, and bytes."""

    computing: float = 0.0
    waiting_for_reads: float = 0.0
    waiting_for_writes: float = 0.0
    reading: float = 0.0
    writing: float = 0.0
    bytes_read: int = 0
    bytes_written: int = 0


class Clock:
    """How long at least one transfer of a kind has been under way, as far as it was looked at."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._under_way: list[StoreFuture[Any]] = []
        self._since = 0.0

    def started(self, future: StoreFuture[Any]) -> None:
        """It is under way from now on."""
        self.look()
        if not self._under_way:
            self._since = time.perf_counter()
        self._under_way.append(future)

    def look(self) -> None:
        """Notice those that have ended."""
        if self._under_way:
            self._under_way = [future for future in self._under_way if not future.done()]
            if not self._under_way:
                self.seconds += time.perf_counter() - self._since


class Sweep:
    """``step`` each sub-group, then ``commit``, or ``undo`` all.

    A step never overwrites the block that it has read: each sub-group has two on the drive, that of the last whole step and
    the one being written.
    """

    def __init__(self, store: TensorStore, pool: BufferPool, slots: int) -> None:
        self._store = store
        self._pool = pool
        self._slots = [Slot(Room(pool), Room(pool)) for _ in range(slots)]
        self._usable = slots
        self._read_only = Room(pool)
        self._log: list[tuple[SubGroup, Callable[[], None], Layout]] = []
        self._upcoming: list[SubGroup] = []
        self.times = Times()
        self._reads, self._writes = Clock(), Clock()

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
        self._upcoming = list(order)
        # A step that makes states has them, and weights to go beside them, in memory of their own as well.
        self._usable = 1 if any(sub_group.layout is None for sub_group in order) else len(self._slots)
        self._read_ahead()

    def step(self, sub_group: SubGroup, gradients: Callable[[], Gradients], groups: Sequence[dict[str, Any]]) -> None:
        """Read it if that was not begun, step it, begin to write it. Raises OSError from any transfer of this sweep."""
        if sub_group in self._upcoming:
            self._upcoming.remove(sub_group)
        slot = self._slot_of(sub_group)
        self._until_read(slot)
        taken = sub_group.image()
        images = slot.image.take(taken.nbytes) if taken.sections else None
        if images is not None:
            for section in taken.sections:
                piece = sub_group.pieces[section.piece]
                section.of(images).copy_(piece.of(piece.param))
        self._log.append((sub_group, sub_group.remember(), taken))
        begun = time.perf_counter()
        held = sub_group.step(slot.content, gradients(), groups)
        if held is not None:
            slot.content = self._laid_out(sub_group, slot, held)
            del held
            give_back_heap()
        self.times.computing += time.perf_counter() - begun
        sub_group.current = 0 if sub_group.current is None else 1 - sub_group.current
        self._write(slot, block_name(sub_group), slot.content)
        self._write(slot, image_name(sub_group), images)
        self._read_ahead()

    def drain(self) -> None:
        """Wait for all transfers. Raises the OSError of the first that failed."""
        errors = []
        for slot in self._slots:
            if slot.reading is not None:
                with _adding_to(self.times, "waiting_for_reads"):
                    errors.append(slot.reading.exception())
                slot.reading = None
                if errors[-1] is not None:
                    slot.holds = slot.content = None
            with _adding_to(self.times, "waiting_for_writes"):
                errors += [future.exception() for future in slot.writing]
            slot.writing = []
        for error in errors:
            if error is not None:
                raise error
        self._look()

    def commit(self) -> None:
        """The step has been made. Nothing may be under way."""
        self._log.clear()
        self._upcoming.clear()
        for slot in self._slots:
            if slot.holds is not None and not slot.holds.image().sections:
                slot.image.release()
        if self._usable < len(self._slots):
            self._pool.trim()  # what was for images

    def undo(self) -> None:
        """Bring parameters and states back to where the last commit left them.

        Raises OSError or MemoryError, when all has been tried, if some could not be read.
        """
        with contextlib.suppress(OSError):
            self.drain()
        self._upcoming.clear()
        images = {slot.holds.index: slot.image for slot in self._slots if slot.holds is not None}
        self.forget()
        for slot in self._slots:  # undoing takes no more memory than stepping
            slot.block.release()
        failed: OSError | MemoryError | None = None
        while self._log:
            sub_group, forget, taken = self._log[-1]
            forget()
            try:
                self._restore(sub_group, taken, images.get(sub_group.index))
            except (OSError, MemoryError) as error:
                failed = failed or error
            self._log.pop()
        self._read_only.release()
        for slot in self._slots:  # a transfer that was interrupted before it was noted still has the memory
            slot.image.release()
        if failed is not None:
            raise failed

    def finish_times(self) -> Times:
        """Of everything since they were last asked for."""
        self._look()
        times, self.times = self.times, Times()
        times.reading, times.writing = self._reads.seconds, self._writes.seconds
        self._reads.seconds = self._writes.seconds = 0.0
        return times

    def forget(self) -> None:
        """Have what is on the drive read again."""
        for slot in self._slots:
            slot.holds = slot.content = None

    def release(self) -> None:
        """Wait, and give all memory back."""
        with contextlib.suppress(OSError):
            self.drain()
        self.forget()
        for slot in self._slots:
            slot.block.release()
            slot.image.release()

    def write_now(self, sub_group: SubGroup, held: Held) -> None:
        """Make ``held`` the sub-group's next block, and wait until it is on the drive."""
        slot = self._free_slot()
        slot.content = self._laid_out(sub_group, slot, held)
        slot.holds = sub_group
        sub_group.current = 0 if sub_group.current is None else 1 - sub_group.current
        self._write(slot, block_name(sub_group), slot.content)
        self.drain()

    def _slot_of(self, sub_group: SubGroup) -> Slot:
        slot = next((slot for slot in self._slots if slot.holds is sub_group), None)
        if slot is None:
            slot = self._free_slot()
            self._read(slot, sub_group)
        elif slot.writing:
            self._until_written(slot)
        return slot

    def _read(self, slot: Slot, sub_group: SubGroup) -> None:
        slot.holds, slot.content = sub_group, None
        if sub_group.layout is not None:
            slot.content = slot.block.take(sub_group.layout.nbytes)
            slot.reading = self._store.get(block_name(sub_group), slot.content)
            self._reads.started(slot.reading)
            self.times.bytes_read += slot.content.nbytes

    def _write(self, slot: Slot, name: str, content: torch.Tensor | None) -> None:
        if content is not None:
            future = self._store.put(name, content)
            slot.writing.append(future)
            self._writes.started(future)
            self.times.bytes_written += content.nbytes

    def _read_ahead(self) -> None:
        for sub_group in self._upcoming:
            if any(slot.holds is sub_group for slot in self._slots):
                continue
            slot = self._idle_slot()
            if slot is None:
                break
            self._read(slot, sub_group)

    def _idle_slot(self) -> Slot | None:
        idle = [slot for slot in self._slots[: self._usable] if not slot.busy and slot.holds not in self._upcoming]
        return min(idle, key=lambda slot: slot.holds is not None, default=None)

    def _free_slot(self) -> Slot:
        while (slot := self._idle_slot()) is None:
            busy = [slot for slot in self._slots if slot.writing]
            if busy:
                self._until_written(busy[0])
            else:  # all were read ahead of their turn, and another is asked for
                last = max(self._slots, key=self._turn)
                self._until_read(last)
                last.holds = last.content = None
        return slot

    def _turn(self, slot: Slot) -> int:
        return self._upcoming.index(slot.holds) if slot.holds is not None and slot.holds in self._upcoming else -1

    def _until_read(self, slot: Slot) -> None:
        if slot.reading is None:
            return
        with _adding_to(self.times, "waiting_for_reads"):
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
        self._look()

    def _until_written(self, slot: Slot) -> None:
        with _adding_to(self.times, "waiting_for_writes"):
            while slot.writing:
                slot.writing[0].result()
                slot.writing.pop(0)
        self._look()

    def _laid_out(self, sub_group: SubGroup, slot: Slot, held: Held) -> torch.Tensor:
        before, slot.block = slot.block, Room(self._pool)  # what is held may lie in it
        layout = sub_group.lay_out(held)
        content = slot.block.take(layout.nbytes)
        for section, (_, _, tensor) in zip(layout.sections, held, strict=True):
            section.of(content).copy_(tensor)
        before.release()
        return content

    def _restore(self, sub_group: SubGroup, taken: Layout, image: Room | None) -> None:
        if taken.sections:
            if image is not None:
                images = image.take(taken.nbytes)
            else:
                images = self._read_only.take(taken.nbytes)
                self._store.get(image_name(sub_group), images).result()
            for section in taken.sections:
                piece = sub_group.pieces[section.piece]
                piece.of(piece.param).copy_(section.of(images))
        imaged = {section.piece for section in taken.sections}
        sections = sub_group.layout.sections if sub_group.layout is not None else ()
        masters = [section for section in sections if section.key == MASTER and section.piece not in imaged]
        if sub_group.layout is not None and masters:
            content = self._read_only.take(sub_group.layout.nbytes)
            self._store.get(block_name(sub_group), content).result()
            for section in masters:
                piece = sub_group.pieces[section.piece]
                piece.of(piece.param).copy_(section.of(content))

    def _look(self) -> None:
        self._reads.look()
        self._writes.look()


def block_name(sub_group: SubGroup) -> str:
    """In the store, of its last block."""
    return f"{sub_group.index}.{sub_group.current}"


def image_name(sub_group: SubGroup) -> str:
    """In the store, of its parameters before the last step."""
    return f"{sub_group.index}.image"


def _ended(future: StoreFuture[int]) -> bool:
    """Whether it has. Raises what it ended with."""
    if not future.done():
        return False
    future.result()
    return True


@contextlib.contextmanager
def _adding_to(times: Times, name: str) -> Iterator[None]:
    begun = time.perf_counter()
    try:
        yield
    finally:
        setattr(times, name, getattr(times, name) + time.perf_counter() - begun)
