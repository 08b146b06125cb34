"""Tiles in as much memory as there is for them: fetched before they are needed, written behind, and some of them always there."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Protocol

from deepnvme.swap.buffers import BufferPool, Lease, OutOfBuffers

from .tile import Tile

if TYPE_CHECKING:
    import torch

    from deepnvme.engine import Future

_PATIENCE_SECONDS = 300.0
"""How long others' leases are waited for: longer than any transfer takes, shorter than one takes a program to be hung."""


class Transfers(Protocol):
    """What of :class:`deepnvme.Engine` is used."""

    def read(self, tensor: torch.Tensor, source: str, offset: int = 0) -> Future: ...

    def write(self, tensor: torch.Tensor, target: str, offset: int = 0) -> Future: ...


class TileCache:
    """``limit``: bytes of leases that it keeps to, unless what is in use alone needs more and ``pool`` has it.

    A write that fails leaves its tile as it was, in memory: the error is raised by the next :meth:`acquire` or :meth:`flush`,
    before that changes anything, and the write tried again when the memory is wanted. Not thread-safe.
    """

    def __init__(self, engine: Transfers, pool: BufferPool, limit: int) -> None:
        self.engine = engine
        self._pool = pool
        self._in_flight: deque[Tile] = deque()  # as submitted, which is about the order in which they end
        self._tiles: dict[Tile, None] = {}  # those in memory, in the order in which they came
        self._agenda: deque[tuple[Tile, int]] = deque()
        self._failures: list[OSError] = []
        self.limit = limit
        self.used = 0
        """Bytes of leases held."""
        self.turn = 0
        """Of the sub-group in use, or used last."""
        self.turns = 1
        """How many there are."""

    def create(self, tile: Tile) -> torch.Tensor:
        """Memory for new contents of a tile, undefined as yet; it is to be written. Bytes, one dimension."""
        if tile.lease is None:
            self._allocate(tile)
        self.settle(tile)  # a write of the old contents
        if tile.lease is None:
            self._allocate(tile)
        assert tile.lease is not None
        tile.dirty = True
        return tile.lease.buffer

    def acquire(self, tiles: Iterable[Tile]) -> None:
        """Have these in memory, with nothing under way, until they are released.

        Raises OSError, for these or for an earlier write, and OutOfBuffers: then nothing is acquired, nothing lost, and the call
        can be repeated.
        """
        self._raise_failure()
        tiles = list(tiles)
        wanted = [tile for tile in tiles if not tile.in_use]
        for tile in wanted:
            tile.in_use = True
        try:
            for tile in tiles:
                if tile.lease is None:
                    self._allocate(tile)
                    self._read(tile)
            while any(tile.transfer is not None for tile in tiles):
                self._go_on()  # all the room that these need, they have by now
                self._advance()
            for tile in tiles:
                if tile.error is not None:
                    raise tile.error
        except BaseException:
            for tile in wanted:
                tile.in_use = False
            raise

    def release(self, tiles: Iterable[Tile], changed: bool) -> None:
        """Let go of acquired or created tiles. What ``changed`` is written as soon as possible, unless it stays in memory."""
        for tile in tiles:
            tile.in_use = False
            tile.dirty = tile.dirty or changed
            if tile.dirty and not tile.resident:
                self._write(tile)

    def discard(self, tile: Tile) -> None:
        """Forget a tile's contents, in memory and in its file."""
        self.settle(tile)
        self._free(tile)
        tile.stored = tile.dirty = tile.in_use = False

    def settle(self, tile: Tile) -> None:
        """Wait until nothing of a tile is under way."""
        while tile.transfer is not None:
            self._advance()

    def send(self, tile: Tile) -> None:
        """Write a tile that has been filled, and free its memory after that."""
        if tile.idle and tile.dirty:
            self._write(tile)

    def overwrite(self, tile: Tile, content: torch.Tensor, offset: int) -> None:
        """Write a part of a tile that is not in memory to its file. ``offset``: bytes. Raises OSError."""
        self.engine.write(content, tile.path, offset).result()

    def read_ahead(self, tiles: Iterable[tuple[Tile, int]]) -> None:
        """Read these next, one after the other, each when no more than so many bytes are in use with it, and in the meantime of
        whatever is waited for. Replaces what was to be read ahead before."""
        self._agenda = deque(tiles)
        self._go_on()

    def poll(self) -> None:
        """Take note of what has ended. Never blocks."""
        while self._in_flight and self._in_flight[0].transfer is not None and self._in_flight[0].transfer.done():
            self._advance()
        self._go_on()

    def flush(self, tiles: Iterable[Tile]) -> None:
        """Have the files be what is in memory, but for what is in use. Raises OSError; what failed stays in memory."""
        self._agenda.clear()
        self._drain()
        self._failures.clear()  # what failed is still to be written
        for tile in tiles:
            self.send(tile)
        self._drain()
        self._raise_failure()

    def forget_memory(self) -> None:
        """Drop from memory what the files have as well, so that it is read from there."""
        self._agenda.clear()
        self._drain()
        for tile in list(self._tiles):
            if tile.idle and not tile.dirty:
                self._free(tile)

    # Transfers

    def _read(self, tile: Tile) -> None:
        assert tile.lease is not None
        tile.writing = False
        try:
            tile.transfer = self.engine.read(tile.lease.buffer, tile.path)
        except OSError as error:
            tile.error = error
            self._free(tile)
        except ValueError as error:  # past the end of the file
            tile.error = OSError(f"{tile.path!r} is shorter than the {tile.nbytes} bytes that were stored there: {error}")
            self._free(tile)
        else:
            self._in_flight.append(tile)

    def _write(self, tile: Tile) -> None:
        assert tile.lease is not None
        try:
            tile.transfer = self.engine.write(tile.lease.buffer, tile.path)
        except OSError as error:
            self._failures.append(error)
        else:
            tile.writing = True
            self._in_flight.append(tile)

    def _drain(self) -> None:
        while self._in_flight:
            self._advance()

    def _advance(self) -> None:
        """Wait for the transfer that was started first."""
        tile = self._in_flight[0]
        assert tile.transfer is not None
        error = tile.transfer.exception()
        self._in_flight.popleft()
        tile.transfer = None
        if not tile.writing:
            tile.error = error
            if error is not None:
                self._free(tile)
        elif error is not None:
            self._failures.append(error)
        else:
            tile.dirty, tile.stored = False, True
            if not tile.in_use and not tile.resident:
                self._free(tile)

    def _go_on(self) -> None:
        """Read ahead as far as there is room."""
        while self._agenda:
            tile, limit = self._agenda[0]
            if tile.lease is None and tile.stored:
                if not self._try_to_allocate(tile, limit):
                    return
                self._read(tile)
            self._agenda.popleft()

    def _raise_failure(self) -> None:
        if self._failures:
            failures, self._failures = self._failures, []
            raise failures[0]

    # Memory

    def _allocate(self, tile: Tile) -> None:
        while self.used + tile.nbytes > self.limit:
            if not self._make_room():
                break  # what is in use needs more than the limit: grow
        lease = self._pool.try_lease(tile.nbytes)
        while lease is None and self._make_room():
            lease = self._pool.try_lease(tile.nbytes)
        self._take(tile, self._grow(tile) if lease is None else lease)

    def _try_to_allocate(self, tile: Tile, limit: int) -> bool:
        """For reading ahead: only what is free, or needed later than the tile."""
        while self.used + tile.nbytes > min(limit, self.limit):
            spare = next(self._spare(), None)
            if spare is None or self._distance(spare) <= self._distance(tile):
                return False
            self._free(spare)
        lease = self._pool.try_lease(tile.nbytes)
        if lease is not None:
            self._take(tile, lease)
        return lease is not None

    def _take(self, tile: Tile, lease: Lease) -> None:
        tile.lease, tile.error = lease, None
        self._tiles[tile] = None
        self.used += tile.nbytes

    def _free(self, tile: Tile) -> None:
        if tile.lease is not None:
            tile.lease.release()
            tile.lease = None
            del self._tiles[tile]
            self.used -= tile.nbytes

    def _make_room(self) -> bool:
        """Free some memory, at the least cost: whether there was any to free. Raises OSError if writing it to its file failed."""
        spare = next(self._spare(), None)
        if spare is not None:
            self._free(spare)
            return True
        if any(tile.writing and not tile.in_use for tile in self._in_flight):
            self._advance()
            self._raise_failure()
            return True
        idle = [tile for tile in self._tiles if tile.idle]
        if idle:
            last = max(idle, key=lambda tile: (not tile.resident, self._distance(tile)))
            last.resident = False
            if last.dirty:
                self._write(last)
                self._raise_failure()
            return True
        if any(not tile.in_use for tile in self._in_flight):
            self._advance()
            return True
        return False

    def _spare(self) -> Iterator[Tile]:
        """Of what is in memory and in its file as well, and need not stay, what is needed last."""
        spare = [tile for tile in self._tiles if tile.idle and not tile.dirty and not tile.resident]
        return iter(sorted(spare, key=self._distance, reverse=True))

    def _distance(self, tile: Tile) -> int:
        """Sub-groups until its own is needed."""
        return (tile.turn - self.turn) % self.turns

    def _grow(self, tile: Tile) -> Lease:
        try:
            # leases taken by another thread for this cache would be waited for in vain
            return self._pool.lease(tile.nbytes, timeout=_PATIENCE_SECONDS if self._pool.in_use > self.used else 0.0)
        except (OutOfBuffers, TimeoutError) as error:
            raise OutOfBuffers(
                f"the sub-group at hand needs {self.used} bytes of swap buffers and {tile.nbytes} more; buffer_count allows "
                f"{self.limit}, set it larger; {error}"
            ) from error
