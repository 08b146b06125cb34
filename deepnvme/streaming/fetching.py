"""Extents in memory ahead of their use, and out of it after."""

from __future__ import annotations

import concurrent.futures
import contextlib
import gc
import itertools
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from deepnvme.memory.pool import OutOfBuffers

if TYPE_CHECKING:
    import torch

    from .slots import Slot, Slots

_POLL_SECONDS = 0.0005
"""Between looks at a read while another may make room for the next: short beside the 5 ms that a small extent takes."""

_LINGER_SECONDS = 0.5
"""How long a thread that is done with memory may take to let go of it."""


class Reading(Protocol):
    """A read under way: see :class:`deepnvme.Future`."""

    def done(self) -> bool: ...

    def exception(self, timeout: float | None = None) -> BaseException | None: ...


@dataclass(eq=False)
class _Extent:
    """One that is in memory or on its way there."""

    memory: torch.Tensor
    slot: Slot | None
    """None: it stays."""
    reading: Reading | None
    """None: it is there."""
    users: int = 0

    def failed(self) -> bool:
        return self.reading is not None and self.reading.done() and self.reading.exception() is not None


class Fetcher:
    """Reads extents into slots of memory: what is taken, and ahead of that what is expected.

    ``read(key, memory)``: starts reading an extent into so many bytes, and returns at once. ``sizes``: bytes of memory that
    each needs. ``slots``: where, one in each; there is room for the largest. ``residents``: extents that stay in memory of
    their own once they have been read. ``stored``: bytes that the drive gives for each, where these are others.

    - Each use of an extent is between a ``take`` and a ``give_back``, and in between its memory stays as it is. Uses may overlap;
      an extent is in memory once, however many use it.
    - As many extents are read ahead as there is room for beside what is wanted now; where that takes no room, beside as much as
      the first of them. So what was expected wrongly is seldom waited for: where what is wanted in its place is larger. Reads
      begin as soon as there is a slot, before anything waits.
    - A slot in which somebody still sees memory that was given back is not read into. It is missing until the last view goes.
    - Where more is in use at a time than there is room for, there is more until it is given back; and one slot more where
      somebody keeps another.
    - A read that fails leaves nothing behind: the extent is read again when it is next taken. An error is raised only where that
      extent is taken, and only that of a read which began there: what failed while it was read ahead is read once more, since the
      fault may have been told of, and mended, before.
    - KeyboardInterrupt may come anywhere. After one, :meth:`recover` comes before anything else.

    Not thread-safe: whoever shares one takes turns.
    """

    def __init__(
        self,
        read: Callable[[str, torch.Tensor], Reading],
        sizes: Mapping[str, int],
        slots: Slots,
        residents: Collection[str] = (),
        stored: Mapping[str, int] | None = None,
    ) -> None:
        self._read, self._sizes, self._slots = read, sizes, slots
        self._stored = sizes if stored is None else stored
        self._extents: dict[str, _Extent] = {}
        self._expected: dict[str, None] = {}  # in order; those in use or in memory already among them
        self._dropped: list[Reading] = []  # of extents that nobody wants any more, in slots that are not free before they end
        self._residents = frozenset(residents)
        self.bytes_read = 0
        """By reads begun so far, in vain too."""
        self.waited = 0.0
        """Seconds in which :meth:`take` had nothing to do but wait."""

    def take(self, keys: Sequence[str], then: Iterable[str] = ()) -> list[torch.Tensor]:
        """The memory of these, once they are there, each to be given back once.

        ``then``: what will be wanted after that, in order, looked at as far as there is room. It is read ahead from now on; what
        was read ahead so far and is not in it is let go.

        Raises what ``read`` raised or its read ended with, or OutOfBuffers if all slots are kept by others; none of ``keys`` is
        taken then. Blocks; Ctrl-C interrupts the waiting.
        """
        taken: list[str] = []
        begun: set[str] = set()
        try:
            self._expect(then, keys)
            for key in keys:
                if self._demand(key):
                    begun.add(key)
                taken.append(key)
            self._advance()
            return [self._arrived(key, key in begun) for key in keys]
        except BaseException:
            self.give_back(taken)
            raise

    def expect(self, keys: Iterable[str]) -> None:
        """Say what will be wanted next, in order, in place of what was said before. Never blocks."""
        self._expect(keys, ())
        self._advance()

    def give_back(self, keys: Iterable[str], changed: bool = False) -> None:
        """End a use of each. Memory of one that nobody uses any more is read into again, unless the extent is expected next.
        Never blocks. ``changed``: its memory is not what was read; it is read again for its next use."""
        for key in keys:
            if self._extents[key].users == 1 and (changed or not self._stays(key)):
                self._forget(key)
            else:
                self._extents[key].users -= 1
        self._advance()

    def is_resident(self, key: str) -> bool:
        """Whether it stays in memory from its first use on."""
        return key in self._residents

    def keep(self, residents: Collection[str]) -> None:
        """Have these stay, once they are read, and no others. Nothing may be in use."""
        self._residents = frozenset(residents)
        for key in filter(self._is_misplaced, list(self._extents)):
            self._forget(key)

    def drain(self) -> None:
        """Read nothing ahead any more, and wait for what was begun for nothing."""
        self.expect(())
        self._wait_for_dropped()

    def close(self) -> None:
        """Let go of everything. Waits for reads under way."""
        self._expected = {}
        for key in list(self._extents):
            self._forget(key)
        self._wait_for_dropped()

    def recover(self) -> list[str]:
        """End all uses, and finish a :meth:`keep`, after something has interrupted who would have. Returns the extents whose
        memory was let go for that: it may have been changed."""
        left = [key for key, extent in self._extents.items() if extent.users or self._is_misplaced(key)]
        for key in left:
            self._forget(key)
        if left:
            self._advance()
        return left

    # What is in memory.

    def _is_misplaced(self, key: str) -> bool:
        """Whether it is in a slot and should stay, or the other way round."""
        return (self._extents[key].slot is None) != (key in self._residents)

    def _expect(self, keys: Iterable[str], now: Collection[str]) -> None:
        """Of ``keys`` what there is room for beside ``now``; let go of the others that are read ahead."""
        room = self._slots.nbytes - sum(self._sizes[key] for key in now if key not in self._residents)
        kept_free = room == self._slots.nbytes  # as much as the first of those takes
        expected: dict[str, None] = {}
        loaded = sum(extent.slot is None and extent.reading is None for extent in self._extents.values())
        if loaded < len(self._sizes):
            for key in itertools.islice(keys, 2 * len(self._sizes)):
                extent = self._extents.get(key)
                if key in expected or (extent is not None and extent.slot is None and extent.reading is None):
                    continue
                if key not in now and (extent is None or extent.users == 0):
                    if kept_free:
                        room -= self._sizes[key]
                        kept_free = False
                    room -= self._sizes[key]
                    if room < 0 and (extent is None or extent.slot is None):
                        break  # what is on its way stays, where what is wanted now needs no room
                expected[key] = None
        before, self._expected = self._expected, expected
        for key in before:  # only of these any are in slots that nobody uses
            extent = self._extents.get(key)
            if extent is not None and extent.users == 0 and key not in now and not self._stays(key):
                self._forget(key)

    def _stays(self, key: str) -> bool:
        """Whether it does where nobody uses it."""
        extent = self._extents[key]
        return (key in self._expected or extent.slot is None) and not extent.failed()

    def _advance(self) -> None:
        """Begin to read what is expected, as far as there are slots."""
        for key in self._expected:
            if key not in self._extents:
                try:
                    if self._begin(key) is None:
                        break
                except Exception:
                    break  # the error is raised where the extent is wanted, if it still comes then

    def _begin(self, key: str, limit: int = 0) -> _Extent | None:
        """Start reading it, unless there is no slot for it, nor with so many bytes in all."""
        nbytes = self._sizes[key]
        if key in self._residents:
            slot, memory = None, self._slots.memory(nbytes)
        else:
            slot = self._slots.lease(nbytes, limit)
            if slot is None:
                return None
            memory = slot.buffer
        try:
            extent = self._extents[key] = _Extent(memory, slot, self._read(key, memory))
        except BaseException:
            del memory
            if slot is not None:
                slot.release()
            raise
        self.bytes_read += self._stored[key]
        return extent

    def _forget(self, key: str) -> None:
        extent = self._extents.pop(key)
        if extent.reading is not None:
            self._dropped.append(extent.reading)
            self._reap()
        if extent.slot is not None:
            extent.slot.release(after=extent.reading)

    # Waiting. No frame that an error passes through may hold an extent: its traceback would keep the slot.

    def _demand(self, key: str) -> bool:
        """Use it from now on, and have a read of it under way, if need be after waiting for a slot. Whether it begins here."""
        if key in self._extents and self._extents[key].failed():  # perhaps long ago
            self._forget(key)
        begins = key not in self._extents
        extent = self._demanded(key) if begins else self._extents[key]
        extent.users += 1
        return begins

    def _demanded(self, key: str) -> _Extent:
        while True:
            extent = self._begin(key)
            if extent is not None:
                return extent
            ahead = [other for other, extent in self._extents.items() if extent.users == 0 and extent.slot is not None]
            if ahead:  # slots that are kept leave fewer to read ahead into
                self._expected.pop(ahead[-1], None)
                self._forget(ahead[-1])
            elif self._dropped:
                self._waited_for(self._dropped[0])
                self._reap()
            else:
                return self._squeezed_in(key)

    def _squeezed_in(self, key: str) -> _Extent:
        """Where nothing that is known of will leave a slot: threads on their way out may, and garbage."""
        deadline = time.monotonic() + _LINGER_SECONDS
        in_use = sum(self._sizes[key] for key, extent in self._extents.items() if extent.users > 0 and extent.slot is not None)
        limit = max(self._slots.nbytes, in_use + self._sizes[key]) + self._sizes[key]
        extent = self._begin(key, limit)
        while extent is None:
            if time.monotonic() > deadline:
                raise OutOfBuffers(f"no memory to read {key!r} into: all {limit} bytes hold what somebody keeps a view of")
            gc.collect()  # tracebacks keep what they saw, in cycles
            time.sleep(_POLL_SECONDS)
            extent = self._begin(key, limit)
        return extent

    def _arrived(self, key: str, begun_here: bool) -> torch.Tensor:
        """Its memory, when it has been read. Of a read that began earlier, for nobody yet, an error is old: it is repeated."""
        extent = self._extents[key]
        try:
            if extent.reading is not None:
                error = self._outcome(extent.reading)
                if error is not None and not begun_here:
                    extent.reading = self._read(key, extent.memory)
                    self.bytes_read += self._stored[key]
                    error = self._outcome(extent.reading)
                if error is not None:
                    try:
                        raise error
                    finally:
                        del error
                extent.reading = None
            return extent.memory
        finally:
            del extent  # which an error's traceback would keep in memory

    def _outcome(self, reading: Reading) -> BaseException | None:
        return reading.exception() if reading.done() else self._waited_for(reading)

    def _starved(self) -> bool:
        """Whether something expected has no slot yet, and a read that was dropped may leave it one."""
        if not self._dropped or all(key in self._extents for key in self._expected):
            return False
        return self._reap() or bool(self._dropped)

    def _wait_for_dropped(self) -> None:
        while self._dropped:
            self._dropped[-1].exception()
            self._dropped.pop()

    def _reap(self) -> bool:
        """Whether any read that was dropped has ended."""
        ended = [reading for reading in self._dropped if reading.done()]
        for reading in ended:
            reading.exception()  # nobody else will look at it
            self._dropped.remove(reading)
        return bool(ended)

    def _waited_for(self, reading: Reading) -> BaseException | None:
        begun = time.perf_counter()
        try:
            while self._starved():
                with contextlib.suppress(TimeoutError, concurrent.futures.TimeoutError):
                    return reading.exception(_POLL_SECONDS)
                self._advance()
            return reading.exception()
        finally:
            self.waited += time.perf_counter() - begun
