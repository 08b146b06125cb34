"""Tiles in as much memory as there is for them: fetched before they are needed, written behind, and some of them always there."""

from __future__ import annotations

import contextlib
import errno
import threading
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

from deepnvme.swap.buffers import BufferPool, Lease

from .growth import lease_more
from .tile import Tile

if TYPE_CHECKING:
    import torch

    from deepnvme.engine import Future


class Transfers(Protocol):
    """What of :class:`deepnvme.Engine` is used."""

    def read(self, tensor: torch.Tensor, source: str, offset: int = 0) -> Future: ...

    def write(self, tensor: torch.Tensor, target: str, offset: int = 0) -> Future: ...


class TileCache:
    """``limit``: bytes of leases that it keeps to, unless what is in use alone needs more and ``pool`` has it.

    A write that fails leaves its tile as it was, in memory: the error is raised by the next :meth:`acquire` or :meth:`flush`,
    before that changes anything, and the write is tried again when the memory is wanted. To be used by one thread at a time.
    """

    # While the caller computes, memory that a write has made free is to be read into at once, or half of the drive's time is
    # lost: a helper waits for transfers then. It runs only while there is something to read ahead and something to wait for.
    # Everything is changed with the lock held, which _advance gives up to wait; so after that, anything but what is in use may
    # have changed. Room that is being made for the caller is not the helper's: it holds still meanwhile.

    def __init__(self, engine: Transfers, pool: BufferPool, limit: int) -> None:
        self.engine = engine
        self.limit = limit
        self.used = 0
        """Bytes of leases held."""
        self.turn = 0
        """Of the sub-group in use, or used last."""
        self.turns = 1
        """How many there are."""
        self._pool = pool
        self._lock = threading.Lock()
        self._in_memory: dict[Tile, None] = {}  # in the order in which they came
        self._in_flight: deque[Tile] = deque()  # as submitted, which is about the order in which they end
        self._agenda: deque[tuple[Tile, int]] = deque()  # to be read ahead
        self._making_room = False
        self._helper: threading.Thread | None = None
        self._failures: list[OSError] = []

    def create(self, tile: Tile) -> Lease:
        """Memory for new contents of a tile, the old ones as far as it was in memory; it is to be written."""
        with self._lock:
            self._settle(tile)
            lease = tile.lease or self._allocate(tile)
            tile.dirty = True
            return lease

    def acquire(self, tiles: Iterable[Tile]) -> None:
        """Have these in memory, with nothing under way, until they are released.

        Raises OSError, for these or for an earlier write, and OutOfBuffers: then nothing is acquired, nothing lost, and the call
        can be repeated.
        """
        with self._lock:
            self._raise_failure()
            wanted = [tile for tile in tiles if not tile.in_use]
            for tile in wanted:
                tile.in_use = True
            try:
                for tile in wanted:
                    if tile.lease is None:
                        self._read(tile, self._allocate(tile))
                while any(tile.transfer is not None for tile in wanted):
                    self._go_on()
                    self._advance()
                for tile in wanted:
                    error, tile.error = tile.error, None
                    if error is not None:
                        raise error
            except BaseException:
                for tile in wanted:
                    tile.in_use = False
                raise

    def release(self, tiles: Iterable[Tile], changed: bool) -> None:
        """Let go of acquired or created tiles. What ``changed`` is written as soon as possible, unless it stays in memory."""
        with self._lock:
            for tile in tiles:
                tile.in_use = False
                tile.dirty = tile.dirty or changed
                if tile.dirty and not tile.resident:
                    self._write(tile)
            self._poll()

    def discard(self, tile: Tile) -> None:
        """Forget a tile's contents, in memory and in its file."""
        with self._lock:
            self._settle(tile)
            self._free(tile)
            tile.stored = tile.dirty = tile.in_use = False

    def settle(self, tile: Tile) -> None:
        """Wait until nothing of a tile is under way."""
        with self._lock:
            self._settle(tile)

    def send(self, tile: Tile) -> None:
        """Write a tile that has been filled, and free its memory after that."""
        with self._lock:
            self._send(tile)

    def overwrite(self, tile: Tile, content: torch.Tensor, offset: int) -> None:
        """Write a part of a tile that is not in memory to its file. ``offset``: bytes. Raises OSError."""
        self.engine.write(content, tile.path, offset).result()

    def read_ahead(self, tiles: Iterable[tuple[Tile, int]]) -> None:
        """Read these next, one after the other, each as soon as no more than so many bytes are in use with it.

        Replaces what was to be read ahead before. What cannot be read is read again, and its error raised, when it is acquired.
        """
        with self._lock:
            self._agenda = deque(tiles)
            self._go_on()

    def poll(self) -> None:
        """Take note of what has ended. Never blocks."""
        with self._lock:
            self._poll()

    def flush(self, tiles: Iterable[Tile]) -> None:
        """Have the files be what is in memory, but for what is in use. Raises OSError; what failed stays in memory."""
        with self._lock:
            self._agenda.clear()
            self._drain()
            self._failures.clear()  # what failed is still to be written
            for tile in tiles:
                self._send(tile)
            self._drain()
            self._raise_failure()

    def forget_memory(self) -> None:
        """Drop from memory what the files have as well, so that it is read from there."""
        with self._lock:
            self._agenda.clear()
            self._drain()
            for tile in [tile for tile in self._in_memory if tile.idle and not tile.dirty]:
                self._free(tile)

    # Transfers

    def _read(self, tile: Tile, lease: Lease) -> None:
        try:
            tile.transfer = self.engine.read(lease.buffer, tile.path)
        except OSError as error:
            self._free(tile)
            tile.error = error.with_traceback(None)  # whose frames would keep the swapper alive
        except ValueError as error:  # past the end of the file
            self._free(tile)
            tile.error = OSError(errno.EIO, f"should have {tile.nbytes} bytes: {error}", tile.path)
        else:
            tile.writing = False
            self._in_flight.append(tile)

    def _write(self, tile: Tile) -> None:
        assert tile.lease is not None
        try:
            tile.transfer = self.engine.write(tile.lease.buffer, tile.path)
        except OSError as error:
            self._failures.append(error.with_traceback(None))
        else:
            tile.writing = True
            self._in_flight.append(tile)

    def _send(self, tile: Tile) -> None:
        if tile.idle and tile.dirty:
            self._write(tile)

    def _settle(self, tile: Tile) -> None:
        while tile.transfer is not None:
            self._advance()

    def _drain(self) -> None:
        while self._in_flight:
            self._advance()

    def _advance(self) -> None:
        """Wait, without the lock, for the transfer that was started first, and take note of how it ended."""
        tile = self._in_flight[0]
        transfer = tile.transfer
        assert transfer is not None
        self._lock.release()
        try:
            error = transfer.exception()
        finally:
            self._lock.acquire()
        if tile.transfer is not transfer:
            return  # another thread was here before
        self._in_flight.remove(tile)
        tile.transfer = None
        if error is None and tile.writing:
            tile.dirty, tile.stored = False, True
            if not tile.in_use and not tile.resident:
                self._free(tile)
        elif error is not None and tile.writing:
            self._failures.append(error)
        elif error is not None:
            self._free(tile)
            tile.error = error

    def _poll(self) -> None:
        while self._in_flight and self._in_flight[0].transfer is not None and self._in_flight[0].transfer.done():
            self._advance()
        self._go_on()

    def _go_on(self) -> None:
        """Read ahead as far as there is room, and have the helper see to the rest."""
        while self._agenda and not self._making_room:
            tile, limit = self._agenda[0]
            if tile.lease is None and tile.stored:
                lease = self._try_to_allocate(tile, limit)
                if lease is None:
                    break
                self._read(tile, lease)
            self._agenda.popleft()
        if self._agenda and self._in_flight and self._helper is None:
            self._helper = threading.Thread(target=self._help, name="deepnvme-read-ahead")
            self._helper.start()

    def _help(self) -> None:
        with self._lock:
            try:
                while self._agenda and self._in_flight:
                    self._advance()
                    self._go_on()
            finally:
                self._helper = None

    def _raise_failure(self) -> None:
        if self._failures:
            failures, self._failures = self._failures, []
            raise failures[0]

    # Memory

    def _allocate(self, tile: Tile) -> Lease:
        """Memory for a tile that is needed now."""
        self._making_room = True
        try:
            while self.used + tile.nbytes > self.limit and self._make_room():
                pass  # until there is enough, or what is in use needs more than the limit
            lease = self._pool.try_lease(tile.nbytes)
            while lease is None and self._make_room():
                lease = self._pool.try_lease(tile.nbytes)
            return self._take(tile, lease or self._grow(tile))
        finally:
            self._making_room = False

    def _try_to_allocate(self, tile: Tile, limit: int) -> Lease | None:
        """Memory for a tile that is read ahead: what is free, or held by one that is needed later."""
        while self.used + tile.nbytes > min(limit, self.limit):
            spare = self._spare()
            if spare is None or self._distance(spare) <= self._distance(tile):
                return None
            self._free(spare)
        with contextlib.suppress(MemoryError):  # which is for whoever needs it now
            lease = self._pool.try_lease(tile.nbytes)
            return lease and self._take(tile, lease)
        return None

    def _take(self, tile: Tile, lease: Lease) -> Lease:
        tile.lease, tile.error = lease, None
        self._in_memory[tile] = None
        self.used += tile.nbytes
        return lease

    def _free(self, tile: Tile) -> None:
        if tile.lease is not None:
            tile.lease.release()
            tile.lease = None
            del self._in_memory[tile]
            self.used -= tile.nbytes

    def _make_room(self) -> bool:
        """Free some memory, or have some freed, at the least cost. False if all that there is is in use.

        Raises OSError if what had to be written could not be.
        """
        spare = self._spare()
        if spare is not None:
            self._free(spare)
            return True
        if any(tile.writing and not tile.in_use for tile in self._in_flight):
            self._advance()
            self._raise_failure()
            return True
        idle = [tile for tile in self._in_memory if tile.idle]
        if idle:
            last = max(idle, key=lambda tile: (not tile.resident, self._distance(tile)))
            last.resident = False
            self._send(last)
            self._raise_failure()
            return True
        if any(not tile.in_use for tile in self._in_flight):
            self._advance()
            return True
        return False

    def _spare(self) -> Tile | None:
        """Of what is in memory and in its file as well, and need not stay, what is needed last."""
        spare = [tile for tile in self._in_memory if tile.idle and not tile.dirty and not tile.resident]
        return max(spare, key=self._distance, default=None)

    def _distance(self, tile: Tile) -> int:
        """Sub-groups until its own is needed."""
        return (tile.turn - self.turn) % self.turns

    def _grow(self, tile: Tile) -> Lease:
        shortage = (
            f"the sub-group at hand needs {self.used} bytes of swap buffers and {tile.nbytes} more; buffer_count allows "
            f"{self.limit}, set it larger"
        )
        held = [each.lease for each in self._in_memory if each.lease is not None]
        return lease_more(self._pool, tile.nbytes, held, shortage)
