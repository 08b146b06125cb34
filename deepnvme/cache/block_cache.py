"""A cache of blocks whose next uses are known: it reads blocks ahead, writes them behind, and keeps some resident in memory."""

from __future__ import annotations

import contextlib
import copy
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, NoReturn, Protocol

import torch

from deepnvme.cache.block import Block, Memory, State
from deepnvme.cache.monitor import Monitor, Wait
from deepnvme.memory.lease import Transfer
from deepnvme.memory.pool import OutOfBuffers
from deepnvme.telemetry.high_water_mark import HighWaterMark
from deepnvme.telemetry.profiler_ranges import profiler_range


class Backing(Protocol):
    """Storage of blocks that are not in memory. Its methods start a transfer and return at once; they may raise OSError."""

    def read(self, block: Block, buffer: torch.Tensor) -> Transfer:
        """Start reading the block into ``buffer``, which has as many bytes as the block."""

    def write(self, block: Block, buffer: torch.Tensor) -> Transfer:
        """Start writing the block's bytes from ``buffer``."""


class BlockMemory(Protocol):
    """Source of memory for blocks: slots or leases, up to a limit that only :meth:`grow` exceeds."""

    limit: int
    """Most bytes of memory for all blocks together. Residents with separate memory do not count."""
    separate_residents: bool
    """Whether resident blocks get separate memory, which does not count against ``limit``."""

    def take(self, block: Block) -> Memory | None:
        """Return memory for a block, or None if none is free. Never waits.

        If ``separate_residents``, a resident block gets separate memory.

        Raises MemoryError or OutOfBuffers if the system has too little memory to pin.
        """

    def grow(self, block: Block, held: Sequence[Memory]) -> Memory:
        """Return memory for a block beyond the limit. May wait for other users of the same memory to release theirs.

        Does not wait for ``held``, the memory of the cache's other blocks. Raises OutOfBuffers if no memory can be had.
        """


class Use(NamedTuple):
    """An expected use of a block, for which the cache reads the block ahead."""

    block: Block
    limit: int = sys.maxsize
    """Bytes. The block is read ahead only while all blocks together, including this one, use at most this much memory."""


@dataclass(eq=False)
class _UnderWay:
    """A transfer that was started, and its error once it has ended."""

    transfer: Transfer
    ended: bool = False
    error: BaseException | None = None


class BlockCache(Monitor):
    """Keeps blocks in memory while they are used. Between uses, reads and writes them in the background.

    Invariants:

    1. A block has at most one transfer. While it is used, it has none.
    2. Memory that is used or in transfer is not given to another block.
    3. A read that fails leaves its block without memory. The error is raised by the :meth:`acquire` that has started the
       read. If the read was started ahead, its error may be out of date when the block is used: the block is then read once
       more, unless ``read_again`` is False.
    4. A write that fails leaves its block dirty, in memory. The error is raised by the next :meth:`acquire`, :meth:`create`
       or :meth:`flush`, before that call changes anything. The write is tried again when the memory is needed.
    5. The drive is kept busy with the most urgent transfers: first blocks that a caller waits for, then expected blocks in
       order, with as many writes as make room for them. Other writes are started only when the drive would be idle.
    6. An interrupt (Ctrl-C) takes effect during a wait or after a complete change, so a use has either begun or not.
       :meth:`end_uses`, :meth:`clear` and :meth:`release` end uses that an interrupted caller does not know of.

    Use it from one thread at a time.

    Args:
        backing: Reads and writes blocks.
        memory: Where blocks get their memory.
        retain: Whether blocks that are neither used nor expected stay in memory until the memory is needed. If False, a changed
            block is dropped once it is written, even if it is expected.
        read_again: Whether a block is read once more when it is used, if reading it ahead has failed. If False, using the
            block raises the error.
        busy_bytes: Bytes in transfer that keep the drive busy. Beyond them, only transfers that a caller waits for are
            started.
        helper: Name of a thread that starts the next transfers while the caller computes; None for no such thread.
        leased: Counts the bytes of memory that blocks have, residents included; None for a count of this cache alone.
    """

    def __init__(
        self,
        backing: Backing,
        memory: BlockMemory,
        *,
        retain: bool = True,
        read_again: bool = True,
        busy_bytes: int = sys.maxsize,
        helper: str | None = None,
        leased: HighWaterMark | None = None,
    ) -> None:
        super().__init__(helper)
        self.memory = memory
        self.leased = leased or HighWaterMark()
        self.used = 0
        """Bytes of blocks' memory that count against the memory's limit."""
        self.bytes_read = 0
        """Bytes of all reads started so far."""
        self.bytes_written = 0
        """Bytes of all writes started so far."""
        self._backing = backing
        self._retain = retain
        self._read_again = read_again
        self._busy_bytes = busy_bytes
        self._held: dict[Block, bool] = {}  # blocks that have memory, in the order they got or used it -> whether it counts
        self._transfers: dict[Block, _UnderWay] = {}
        self._expected: dict[Block, int] = {}  # block -> its place among the expected uses
        self._agenda: deque[Use] = deque()  # of the expected uses, those that are still to be read
        self._to_write: deque[Block] = deque()  # when the drive has nothing better to do
        self._wanted: Collection[Block] = ()  # by the call under way: their memory is not taken
        self._grown: tuple[Block, Memory] | None = None  # for a block that is wanted
        self._failures: list[BaseException] = []  # of writes

    # Uses

    def acquire(self, blocks: Iterable[Block], then: Iterable[Use] | None = None) -> None:
        """Begin a use of each block, which keeps the block in memory until it is released. Blocks until all of them are read.

        Args:
            blocks: Different blocks. A block that is already in use keeps its memory and contents.
            then: The uses that follow, as in :meth:`expect`; None leaves the expected uses unchanged.

        Raises:
            OSError: From reading one of these blocks, or from an earlier write. No use has begun then, and no data is lost.
            OutOfBuffers: If there is not enough memory. No use has begun then.
        """
        wanted = tuple(blocks)
        begun: set[Block] = set()

        def prepare() -> None:
            """Raise the error of an earlier write, and set the uses that follow."""
            self.raise_failure()
            for block in wanted:
                self._expected.pop(block, None)
            if then is not None:
                self._set_expected(then)

        def step() -> Wait | None:
            """Start the reads that the blocks need, and begin the uses when all are read."""
            for block in wanted:
                if block.state is State.ABSENT:
                    if block in begun or not self._read_again:
                        _raise_error(block)
                    wait = self._allocate(block, self._read)
                    if wait is not None:
                        return wait
                    begun.add(block)
                    _raise_error(block)
            wait = self._ending_of_any(wanted)
            if wait is None:
                for block in wanted:
                    block.users += 1
            return wait

        self._obtain(wanted, step, prepare, timed=True)

    def create(self, block: Block) -> None:
        """Begin a use of a block whose content the caller will overwrite; the block is not read. May wait for memory.

        If the old content is in memory, it is still there when this returns.

        Raises:
            OSError: From an earlier write, or from a write that had to free memory. The use has not begun then.
            OutOfBuffers: If there is not enough memory.
        """

        def step() -> Wait | None:
            """Allocate the block's memory if it has none, and begin the use."""
            wait = self._ending_of(block)
            if wait is None and block.state is State.ABSENT:
                wait = self._allocate(block, Block.create)
            if wait is None:
                block.change()
                block.users = block.users or 1
            return wait

        self._obtain((block,), step, self.raise_failure)

    def release(self, blocks: Iterable[Block], *, changed: bool = False, write: bool = True) -> None:
        """End a use of each block. Never waits. Ignores blocks that are not in memory.

        Args:
            blocks: Blocks that were acquired or created.
            changed: Whether the blocks' content was changed.
            write: Whether to write dirty blocks soon, unless they are resident. If False, they are written when their memory
                is needed.
        """
        with self._changing():
            for block in blocks:
                block.users = max(block.users - 1, 0)
                if block in self._held:
                    self._held[block] = self._held.pop(block)  # now the one used last
                if changed and block.state in (State.CLEAN, State.DIRTY):
                    block.change()
                if write:
                    self._write_soon(block)
                self._drop_unless_kept(block)

    def reject(self, blocks: Iterable[Block]) -> None:
        """End a use of blocks whose memory has no valid content any more. Drop each block that has no other use."""
        with self._changing():
            for block in blocks:
                block.users = max(block.users - 1, 0)
                if block.users == 0:
                    self._drop(block)

    def discard(self, block: Block) -> None:
        """Forget a block's content, in memory and on the drive, and end its uses. Waits for the block's transfer."""

        def step() -> Wait | None:
            """Drop the block when its transfer has ended."""
            wait = self._ending_of(block)
            if wait is None:
                block.users = 0
                block.stored = False
                self._drop(block)
            return wait

        self._until(step)

    def end_uses(self) -> None:
        """End all uses after an interrupted call. The blocks stay in memory. Never blocks."""
        with self._changing():
            for block in self._held:
                block.users = 0
                self._write_soon(block)

    # What comes next, and what stays

    def expect(self, uses: Iterable[Use]) -> None:
        """Set the expected uses, in order, in place of the previous ones. Their blocks are read ahead. Never blocks.

        Acquiring a block removes its expected use. Without ``retain``, clean blocks that are neither used, nor expected, nor
        resident are dropped.
        """
        self._until(lambda: self._set_expected(uses))

    def keep(self, resident: Mapping[Block, bool]) -> None:
        """Set for each block whether it is resident: whether it stays in memory from its next use on. Never blocks."""
        with self._changing():
            for block, stays in resident.items():
                block.resident = stays
                self._drop_unless_kept(block)
                self._write_soon(block)

    def write(self, block: Block) -> None:
        """Write a dirty block soon, unless it is used or resident. Never blocks."""
        with self._changing():
            self._write_soon(block)

    def poll(self) -> None:
        """Process transfers that have ended, and start further ones. Never blocks."""
        self._until(lambda: None)

    def drain(self, timed: bool = False) -> None:
        """Forget expected uses and queued writes, and wait for all transfers in progress.

        With ``timed``, the wait is added to :attr:`seconds_waited`.
        """

        def step() -> Wait | None:
            """Cancel everything that is not started, and return a function that waits for any transfer."""
            self._set_expected(())
            self._to_write.clear()
            return self._ending_of_any(self._transfers)

        self._until(step, timed=timed)

    def flush(self, blocks: Iterable[Block], used: bool = False) -> None:
        """Write the dirty blocks among ``blocks`` that are not in use, and wait until they are written.

        Args:
            blocks: The blocks.
            used: Whether dirty blocks in use are written as well. Their users must not change them meanwhile.

        Raises:
            OSError: From writing. Blocks that were not written stay dirty in memory, and the call can be repeated.
        """
        self.drain(timed=True)
        with self._changing():
            self._failures.clear()  # what failed is still dirty
            for block in blocks:
                if block.state is State.DIRTY and (used or self._is_idle(block)):
                    self._write(block)
        self.drain(timed=True)
        self.raise_failure()

    def drop_clean(self) -> None:
        """Drop from memory all clean blocks that are not in use. Waits for transfers."""
        self.drain()
        with self._changing():
            for block in self._idle():
                if block.state is State.CLEAN:
                    self._drop(block)

    def clear(self) -> None:
        """End all uses, wait for all transfers, and drop all blocks, even unwritten ones. The cache can be used again.

        Errors of writes are forgotten. If the wait is interrupted, only blocks in transfer are left.
        """
        self._drop_all()
        self.drain()
        self._drop_all()

    def _drop_all(self) -> None:
        """Forget expected uses, queued writes and errors, end all uses, and drop all blocks not in transfer or ``keeping``."""
        with self._changing():
            self._set_expected(())
            self._to_write.clear()
            self._failures.clear()
            for block in list(self._held):
                block.users = 0
                if block not in self._transfers:
                    self._drop(block)

    # Steps

    def _obtain(
        self, wanted: tuple[Block, ...], step: Callable[[], Wait | None], prepare: Callable[[], None], timed: bool = False
    ) -> None:
        """Call ``prepare`` once, then repeat ``step`` until it returns None.

        Meanwhile, free memory goes to the blocks in ``wanted`` first, and their memory is not taken away.
        """
        try:
            self._wanted = wanted
            self._until(step, prepare, timed)
        except BaseException:
            for block in wanted:  # the next expectation drops them, unless they are part of it
                self._expected.setdefault(block, sys.maxsize)
            raise
        finally:
            if self._grown is not None:  # a wait that came after was interrupted
                self._grown[1].release()
            self._wanted, self._grown = (), None

    def _awaited(self) -> Wait | None:
        """Return a function that waits for a write that frees memory, or for any transfer; None if nothing is left to start."""
        if not (self._agenda or self._to_write):
            return None
        return self._memory_to_come() or self._ending_of_any(self._transfers)

    def _blocked_by_other_transfers(self) -> bool:
        """Return whether more blocks could be read ahead once a transfer that no caller waits for has ended."""
        if not self._agenda:
            return False
        unwanted = (block for block in self._transfers if block not in self._wanted and block not in self._expected)
        return any(block.state is State.READING or self._frees_memory(block) for block in unwanted)

    def _collect_ended(self) -> None:
        """Mark transfers that are done as ended, and keep their errors."""
        for under_way in list(self._transfers.values()):
            if not under_way.ended and under_way.transfer.done():
                # A copy, since whoever keeps the transfer would keep the frames that its own error is raised in, and what they
                # have: a training, by the graph of a failed step, through which no garbage collector sees.
                under_way.error = copy.copy(under_way.transfer.exception())
                under_way.ended = True

    def _apply_ended(self) -> None:
        """Move each block whose transfer is marked as ended to its next state."""
        for block, under_way in [item for item in self._transfers.items() if item[1].ended]:
            del self._transfers[block]
            error = under_way.error
            if block.state is State.WRITING:
                if error is not None:
                    block.fail_writing()
                    self._failures.append(error)
                    continue
                block.written()
                self._drop_unless_kept(block, written=True)
            elif error is not None:
                self._release_memory(block, block.fail_reading(error))
                if block not in self._expected and block not in self._wanted:
                    block.error = None  # nobody wants it any more
            else:
                block.read()
                self._drop_unless_kept(block)

    def _start_transfers(self) -> None:
        """Start read-ahead and writes as far as memory and drive allow, once the awaited blocks have memory."""
        if all(block.in_memory for block in self._wanted):
            self._read_ahead()
            while self._to_write and self._bytes_in_transfer() < self._busy_bytes:
                self._write_next()
        self._start_helper()

    def _read_ahead(self) -> None:
        """Start reading expected blocks while memory is free. If it is not, start writes that free memory for the next block."""
        while self._agenda:
            block, limit = self._agenda[0]
            if block.state is State.ABSENT and block.stored and block.error is None and block in self._expected:
                distance = self._distance(block)
                nearer = any(self._distance(other) < distance for other in self._transfers if other.state is State.READING)
                if nearer and self._bytes_in_transfer() >= self._busy_bytes:
                    return
                memory = self._spare_memory(block, limit)
                if memory is None:
                    self._write_for_room(distance, limit)
                    return
                self._hold(block)
                self._read(block, memory)
            self._agenda.popleft()

    def _write_for_room(self, distance: int, limit: int) -> None:
        """Start as many queued writes as must end before the next expected use, at ``distance``, has memory for its blocks."""
        missing = (use.block for use in self._agenda if self._distance(use.block) == distance)
        lacking = sum(block.nbytes for block in missing if block.state is State.ABSENT and block.stored)
        coming = sum(block.nbytes for block in self._transfers if self._frees_memory(block))
        lacking -= min(limit, self.memory.limit) - self.used + coming
        while self._to_write and lacking > 0:
            lacking -= self._write_next()

    def _write_next(self) -> int:
        """Start the first queued write. Return its bytes; 0 if the write is not needed any more."""
        block = self._to_write.popleft()
        if block.state is not State.DIRTY or block.resident or not self._is_idle(block):
            return 0
        self._write(block)
        return block.nbytes

    # Transfers

    def _read(self, block: Block, memory: Memory) -> None:
        block.start_reading(memory)
        try:
            with profiler_range("start_read"):
                self._transfers[block] = _UnderWay(self._backing.read(block, memory.buffer))
        except Exception as error:
            self._release_memory(block, block.fail_reading(error.with_traceback(None)))  # its frames would keep memory alive
        else:
            self.bytes_read += block.nbytes

    def _write(self, block: Block) -> None:
        try:
            with profiler_range("start_write"):
                transfer = self._backing.write(block, block.memory.buffer)
        except OSError as error:
            self._failures.append(error.with_traceback(None))
        else:
            block.start_writing()
            self._transfers[block] = _UnderWay(transfer)
            self.bytes_written += block.nbytes

    def _write_soon(self, block: Block) -> None:
        """Queue a dirty block to be written, unless it is used, resident or queued already."""
        if block.state is State.DIRTY and not block.resident and self._is_idle(block) and block not in self._to_write:
            self._to_write.append(block)

    def _ending_of(self, block: Block) -> Wait | None:
        return self._transfers[block].transfer.exception if block in self._transfers else None

    def _is_write(self, wait: Wait) -> bool:
        return any(block.state is State.WRITING and self._ending_of(block) == wait for block in self._transfers)

    def _ending_of_any(self, blocks: Iterable[Block]) -> Wait | None:
        return next(filter(None, map(self._ending_of, blocks)), None)

    def _bytes_in_transfer(self) -> int:
        return sum(block.nbytes for block in self._transfers)

    def raise_failure(self) -> None:
        """Raise the first error of earlier writes that was not raised yet, and forget the others. Never blocks."""
        if self._failures:
            del self._failures[1:]
            _raise(self._failures)

    # Memory

    def _allocate(self, block: Block, begin: Callable[[Block, Memory], None]) -> Wait | None:
        """Allocate memory for a block that a caller waits for, call ``begin(block, memory)``, and return None.

        If no memory is free, return a function that waits until memory may be free. Raises OSError if a write that had to free
        memory has failed.
        """
        grown_for, memory = self._grown or (None, None)
        if grown_for is not block:
            memory = self._taken(block)
        while memory is None:
            if self._drop_furthest():
                memory = self._taken(block)
                continue
            self.raise_failure()
            wait = self._memory_to_come()
            if wait is not None:
                return wait
            last = self._least_needed()
            if last is None:
                others = (other for other in self._transfers if not other.users and other not in self._wanted)
                return self._ending_of_any(others) or (lambda timeout: self._grow(block))
            if last.state is State.DIRTY:
                self._write(last)  # the next round waits for it, or raises why it could not be started
        self._grown = None
        self._hold(block)
        begin(block, memory)
        return None

    def _grow(self, block: Block) -> None:
        """Get memory beyond the limit for a block that is needed now. May wait for other users of the same memory."""
        self._grown = block, self.memory.grow(block, [other.memory for other, counts in self._held.items() if counts])

    def _taken(self, block: Block, limit: int = sys.maxsize) -> Memory | None:
        """Return memory for a block; None if none is free, or if more than ``limit`` bytes would then be used."""
        if self._counts(block) and self.used + block.nbytes > min(limit, self.memory.limit):
            return None
        return self.memory.take(block)

    def _spare_memory(self, block: Block, limit: int) -> Memory | None:
        """Return memory that is free, or that a block with a later next use held; None if there is none."""
        with contextlib.suppress(MemoryError, OutOfBuffers):  # which are for whoever needs it now
            while (memory := self._taken(block, limit)) is None:
                if not self._drop_furthest(beyond=self._distance(block)):
                    return None
            return memory
        return None

    def _memory_to_come(self) -> Wait | None:
        """Return a function that waits for a write that will free memory; None if there is no such write."""
        return self._ending_of_any(block for block in self._transfers if self._frees_memory(block))

    def _frees_memory(self, block: Block) -> bool:
        """Return whether the block's memory becomes free when the block's write ends."""
        return block.state is State.WRITING and not (block.users or block.resident or block in self._wanted)

    def _drop_furthest(self, beyond: int | None = None) -> bool:
        """Drop the idle clean block whose next use is furthest away, if that is further than ``beyond``.

        Never drops residents. Returns whether a block was dropped.
        """
        last = self._furthest(-1 if beyond is None else beyond)
        if last is None:
            return False
        self._drop(last)
        return True

    def _furthest(self, beyond: int) -> Block | None:
        """Return the idle clean block whose next use is furthest away, if that is further than ``beyond``. Never a resident.

        Of blocks without expected use, the one used longest ago; a subclass may choose another one.
        """
        last, furthest = None, beyond
        for block in self._held:
            if block.state is State.CLEAN and not block.resident and self._is_idle(block):
                distance = self._distance(block)
                if distance > furthest:
                    last, furthest = block, distance
                    if distance == sys.maxsize:  # none is further away; there may be thousands to look at
                        break
        return last

    def _least_needed(self) -> Block | None:
        """Return the idle block whose next use is furthest away, or None if no block is idle.

        A resident is returned only if there is no other idle block, and is no longer resident then. Blocks whose memory does
        not count against the limit are left out.
        """
        idle = (block for block in self._idle() if self._held[block])
        last = max(idle, key=lambda block: (not block.resident, self._distance(block)), default=None)
        if last is not None:
            last.resident = False
        return last

    def _idle(self) -> list[Block]:
        """Return the blocks in memory that nobody uses or waits for."""
        return [block for block in self._held if self._is_idle(block)]

    def _is_idle(self, block: Block) -> bool:
        return block.state in (State.CLEAN, State.DIRTY) and not block.users and block not in self._wanted

    def _counts(self, block: Block) -> bool:
        """Return whether this block's memory counts against the limit."""
        return not (block.resident and self.memory.separate_residents)

    def _drop_unless_kept(self, block: Block, written: bool = False) -> None:
        """Drop a clean, unused block unless it is resident or kept for a later use.

        While more memory is used than the limit, only residents are kept.
        """
        if block.state is not State.CLEAN or not self._is_idle(block):
            return
        wanted = self._retain or (not written and block in self._expected)
        kept = block.resident or (wanted and self.used <= self.memory.limit)
        if not kept or self._held[block] != self._counts(block):  # that is, has memory of the wrong kind
            self._drop(block)

    def _drop(self, block: Block) -> None:
        if block.in_memory:
            self._release_memory(block, block.drop())

    def _hold(self, block: Block) -> None:
        """Record that a block has memory, and whether it counts against the limit."""
        self._held[block] = self._counts(block)
        self.leased.add(block.nbytes)
        if self._held[block]:
            self.used += block.nbytes

    def _release_memory(self, block: Block, memory: Memory) -> None:
        self.leased.add(-block.nbytes)
        if self._held.pop(block):
            self.used -= block.nbytes
        memory.release()

    # Order

    def _set_expected(self, uses: Iterable[Use]) -> None:
        """Replace the expected uses, and drop blocks that were in memory only because their use was expected."""
        before = self._expected
        self._agenda = deque(uses)
        self._expected = {use.block: place for place, use in reversed(list(enumerate(self._agenda)))}
        for block in before:  # others that need not stay are dropped when their use ends: there may be thousands that stay
            if block not in self._expected:
                block.error = None  # that reading it ahead has failed is of no interest any more
                self._drop_unless_kept(block)

    def _distance(self, block: Block) -> int:
        """Return how far away a block's next use is: its place among the expected uses.

        Without an expected use it is ``sys.maxsize``. Blocks with the largest distance are dropped first; among equal ones,
        the one used longest ago.
        """
        return self._expected.get(block, sys.maxsize)


def _raise_error(block: Block) -> None:
    """Raise the error that the last read of a block ended with, if there is one."""
    if block.error is not None:
        errors = [block.error]
        block.error = None
        _raise(errors)


def _raise(errors: list[BaseException]) -> NoReturn:
    """Raise the only error in a list, after removing it from the list.

    So no frame refers to the error. Otherwise its traceback would form a cycle with that frame, and keep the memory that its
    frames refer to.
    """
    error = errors.pop()
    try:
        raise error
    finally:
        del error
