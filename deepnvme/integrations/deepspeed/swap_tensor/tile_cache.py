"""Tiles in as much memory as there is for them: fetched before they are needed, written behind, and some of them always there."""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Protocol

from deepnvme.memory.pool import BufferPool, Lease

from .taking_turns import TakingTurns, Wait
from .tile import Tile
from .tile_memory import TileMemory

if TYPE_CHECKING:
    import torch

    from deepnvme.engine import Future

_BUSY_BYTES = 32 << 20
"""So much in flight keeps a drive busy. More of what nobody waits for would only slow down what somebody does."""


class TransferEngine(Protocol):
    """What of :class:`deepnvme.Engine` is used."""

    def read(self, tensor: torch.Tensor, source: str, offset: int = 0) -> Future: ...

    def write(self, tensor: torch.Tensor, target: str, offset: int = 0) -> Future: ...


class TileCache(TakingTurns):
    """``limit``: bytes of leases that it keeps to, unless what is in use alone needs more and ``pool`` has it.

    A write that fails leaves its tile as it was, in memory: the error is raised by the next :meth:`acquire` or :meth:`flush`,
    before that changes anything, and the write is tried again when the memory is wanted. To be used by one thread at a time.
    """

    # The drive is to be busy with what is needed next, also while the caller computes. What the next sub-group lacks is read
    # before anything else, and just so much is written as makes room for that; all else only while the drive would be idle.
    # And memory that a write has made free is read into at once: a helper waits for transfers while the caller computes.

    def __init__(self, engine: TransferEngine, pool: BufferPool, limit: int) -> None:
        super().__init__("deepnvme-read-ahead")
        self.engine = engine
        self.memory = TileMemory(pool, limit)
        self._in_flight = self.memory.in_flight
        self._to_write: deque[Tile] = deque()  # when the drive has nothing better to do
        self._agenda: deque[tuple[Tile, int]] = deque()  # to be read ahead
        self._grown: Lease | None = None  # for what is wanted
        self._failures: list[OSError] = []

    def create(self, tile: Tile) -> None:
        """Memory for new contents of a tile, the old ones as far as it was in memory; in use until it is released."""

        def step() -> Wait | None:
            wait = self._ending_of(tile) or (self._allocate(tile) if tile.lease is None else None)
            if wait is None:
                tile.dirty = tile.in_use = True
            return wait

        self._obtain((tile,), step)

    def acquire(self, tiles: Iterable[Tile]) -> None:
        """Have these in memory, with nothing under way, until they are released.

        Raises OSError, for these or for an earlier write, and OutOfBuffers: then nothing is acquired, nothing lost, and the call
        can be repeated.
        """
        wanted = tuple(tile for tile in tiles if not tile.in_use)

        def step() -> Wait | None:
            for tile in wanted:
                self._raise_error(tile)
                if tile.lease is None:
                    wait = self._allocate(tile)
                    if wait is not None:
                        return wait
                    self._read(tile)
            for tile in wanted:
                wait = self._ending_of(tile)
                if wait is not None:
                    return wait
                self._raise_error(tile)
            for tile in wanted:
                tile.in_use = True
            return None

        with self._changing():
            self._raise_failure()
            for tile in wanted:
                tile.error = None  # of reading it ahead
        self._obtain(wanted, step)

    def release(self, tiles: Iterable[Tile], *, changed: bool, complete: bool = True) -> None:
        """Let go of acquired or created tiles. What ``changed`` is written soon, unless it stays in memory; what is not
        ``complete`` only where its memory is needed."""
        with self._changing():
            for tile in tiles:
                tile.in_use = False
                tile.dirty = tile.dirty or (changed and tile.lease is not None)
                if complete:
                    self._send(tile)
            self._go_on()

    def discard(self, tile: Tile) -> None:
        """Forget a tile's contents, in memory and in its file."""

        def step() -> Wait | None:
            wait = self._ending_of(tile)
            if wait is None:
                self.memory.free(tile)
                tile.stored = tile.dirty = tile.in_use = False
                if tile in self._to_write:
                    self._to_write.remove(tile)
            return wait

        self._until(step)

    def settle(self, tile: Tile) -> None:
        """Wait until nothing of a tile is under way."""
        self._until(lambda: self._ending_of(tile))

    def send(self, tile: Tile) -> None:
        """Write a tile soon, complete or not, unless it is in use or stays in memory."""
        with self._changing():
            self._send(tile)
            self._go_on()

    def keep(self, tile: Tile, resident: bool) -> None:
        """Have a tile stay in memory, once it is there, or not any more."""
        with self._changing():
            tile.resident = resident
            self._send(tile)

    def overwrite(self, tile: Tile, content: torch.Tensor, offset: int) -> None:
        """Write a part of a tile that is not in memory to its file. ``offset``: bytes. Raises OSError."""
        self.engine.write(content, tile.path, offset).result()

    def read_ahead(self, tiles: Iterable[tuple[Tile, int]]) -> None:
        """Read these next, one after the other, each as soon as no more than so many bytes are in use with it.

        Replaces what was to be read ahead before. What cannot be read is read again, and its error raised, when it is acquired.
        """
        with self._changing():
            self._agenda = deque(tiles)
            self._go_on()

    def poll(self) -> None:
        """Take note of what has ended. Never blocks."""
        with self._changing():
            self._take_note()
            self._go_on()

    def flush(self, tiles: Iterable[Tile]) -> None:
        """Have the files be what is in memory, but for what is in use. Raises OSError; what failed stays in memory."""
        self._drain()
        with self._changing():
            self._failures.clear()  # what failed is still to be written
            for tile in tiles:
                if tile.dirty and self.memory.is_idle(tile):
                    self._write(tile)
        self._drain()
        with self._changing():
            self._raise_failure()

    def forget_memory(self) -> None:
        """Drop from memory what the files have as well, so that it is read from there."""
        self._drain()
        with self._changing():
            for tile in [tile for tile in self.memory.idle() if not tile.dirty]:
                self.memory.free(tile)

    # Steps

    def _obtain(self, wanted: tuple[Tile, ...], step: Callable[[], Wait | None]) -> None:
        """Repeat ``step`` until it returns None. Room comes to ``wanted`` first meanwhile, and their memory is not taken."""

        def wanting() -> Wait | None:
            self.memory.wanted = wanted
            wait = step()
            if wait is None:
                self.memory.wanted = ()
            return wait

        try:
            self._until(wanting)
        finally:  # should a Ctrl-C keep it from this: the next call does it
            self.memory.wanted, self._grown = (), None

    def _drain(self) -> None:
        """Wait for what is under way, and give up what is not yet."""

        def step() -> Wait | None:
            self._agenda.clear()
            self._to_write.clear()
            return next((transfer.exception for transfer in self._in_flight.values()), None)

        self._until(step)

    def _awaited(self) -> Wait | None:
        """What the end of allows to start more."""
        if not (self._agenda or self._to_write):
            return None
        return self._memory_to_come() or next((transfer.exception for transfer in self._in_flight.values()), None)

    # Transfers

    def _take_note(self) -> None:
        """Of what has ended, and how."""
        for tile, transfer in [(tile, transfer) for tile, transfer in self._in_flight.items() if transfer.done()]:
            error = transfer.exception()
            del self._in_flight[tile]
            if not tile.writing:
                if error is not None:
                    self.memory.free(tile)
                    tile.error = error
            elif error is not None:
                self._failures.append(error)
            else:
                tile.dirty, tile.stored = False, True
                if not (tile.in_use or tile.resident or tile in self.memory.wanted):
                    self.memory.free(tile)

    def _go_on(self) -> None:
        """Start what can be, in the order of need, and have the helper see to the rest."""
        if all(tile.lease is not None for tile in self.memory.wanted):
            self._read_on()
            while self._to_write and self._bytes_in_flight() < _BUSY_BYTES:
                self._write_next()
        self._have_helped()

    def _read_on(self) -> None:
        """Read ahead as far as there is room, and make some for what is needed next."""
        while self._agenda:
            tile, limit = self._agenda[0]
            if tile.lease is None and tile.stored:
                distance = self.memory.distance(tile)
                nearer = any(self.memory.distance(other) < distance for other in self._in_flight if not other.writing)
                if nearer and self._bytes_in_flight() >= _BUSY_BYTES:
                    return
                if not self.memory.allocate_ahead(tile, limit):
                    self._write_for_room(tile.turn, limit)
                    return
                self._read(tile)
            self._agenda.popleft()

    def _write_for_room(self, turn: int, limit: int) -> None:
        """Write as much as makes room for what is still to be read of one sub-group."""
        lacking = sum(tile.nbytes for tile, _ in self._agenda if tile.turn == turn and tile.lease is None and tile.stored)
        coming = sum(tile.nbytes for tile in self._in_flight if self._comes_free(tile))
        lacking -= min(limit, self.memory.limit) - self.memory.used + coming
        while self._to_write and lacking > 0:
            lacking -= self._write_next()

    def _write_next(self) -> int:
        """Start writing one of those that are to be; how many bytes it has."""
        tile = self._to_write.popleft()
        if not tile.dirty or tile.resident or not self.memory.is_idle(tile):
            return 0
        self._write(tile)
        return tile.nbytes

    def _read(self, tile: Tile) -> None:
        try:
            transfer = self.engine.read(tile.memory.buffer, tile.path)
        except OSError as error:
            self.memory.free(tile)
            tile.error = error.with_traceback(None)  # whose frames would keep the swapper alive
        except ValueError as error:  # past the end of the file
            self.memory.free(tile)
            tile.error = OSError(errno.EIO, f"should have {tile.nbytes} bytes: {error}", tile.path)
        else:
            tile.writing = False
            self._in_flight[tile] = transfer

    def _write(self, tile: Tile) -> None:
        try:
            transfer = self.engine.write(tile.memory.buffer, tile.path)
        except OSError as error:
            self._failures.append(error.with_traceback(None))
        else:
            tile.writing = True
            self._in_flight[tile] = transfer

    def _send(self, tile: Tile) -> None:
        if tile.dirty and not tile.resident and self.memory.is_idle(tile) and tile not in self._to_write:
            self._to_write.append(tile)

    def _ending_of(self, tile: Tile) -> Wait | None:
        return self._in_flight[tile].exception if tile in self._in_flight else None

    def _bytes_in_flight(self) -> int:
        return sum(tile.nbytes for tile in self._in_flight)

    def _raise_failure(self) -> None:
        if self._failures:
            failures, self._failures = self._failures, []
            raise failures[0]

    @staticmethod
    def _raise_error(tile: Tile) -> None:
        error, tile.error = tile.error, None
        if error is not None:
            raise error

    # Memory

    def _allocate(self, tile: Tile) -> Wait | None:
        """Memory for a tile that is needed now; or what has to be waited for before there is any.

        Raises OSError if what had to be written for it could not be.
        """
        if self._grown is not None:
            self.memory.take(tile, self._grown)
            self._grown = None
        while tile.lease is None and not self.memory.allocate(tile):
            self._raise_failure()
            wait = self._memory_to_come()
            if wait is not None:
                return wait
            last = self.memory.least_needed()
            if last is None:
                return self._anything_to_come() or (lambda: self._grow(tile))
            if last.dirty:
                self._write(last)  # in the next round its end is to come, or why it has none is raised
        return None

    def _grow(self, tile: Tile) -> None:
        self._grown = self.memory.grow(tile)

    def _memory_to_come(self) -> Wait | None:
        """The end of a write that frees memory."""
        return next((transfer.exception for tile, transfer in self._in_flight.items() if self._comes_free(tile)), None)

    def _comes_free(self, tile: Tile) -> bool:
        """Whether what is under way with a tile, if anything, is a write and the last thing that its memory is for."""
        return tile.writing and not (tile.in_use or tile.resident or tile in self.memory.wanted)

    def _anything_to_come(self) -> Wait | None:
        """The end of a transfer after which memory can be taken from somebody."""
        others = (tile for tile in self._in_flight if not tile.in_use and tile not in self.memory.wanted)
        return next((self._in_flight[tile].exception for tile in others), None)
