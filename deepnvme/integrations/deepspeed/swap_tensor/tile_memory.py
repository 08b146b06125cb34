"""The memory that tiles have, within a limit, and which of them is the one to give it up."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from deepnvme.memory.growable import lease_more
from deepnvme.memory.pool import BufferPool, Lease

from .tile import Tile

if TYPE_CHECKING:
    from deepnvme.engine import Future


class TileMemory:
    """Leases of ``pool``, of ``limit`` bytes in all, or of more where :meth:`grow` is needed."""

    def __init__(self, pool: BufferPool, limit: int) -> None:
        self.limit = limit
        self.used = 0
        """Bytes of leases held."""
        self.turn = 0
        """Of the sub-group in use, or used last."""
        self.turns = 1
        """How many there are."""
        self.in_flight: dict[Tile, Future] = {}
        """Between memory and file, as submitted."""
        self.wanted: tuple[Tile, ...] = ()
        """By the call under way: their memory is not taken."""
        self._pool = pool
        self._held: dict[Tile, None] = {}  # in the order in which they came

    def idle(self) -> list[Tile]:
        """In memory, where nobody needs them right now."""
        return [tile for tile in self._held if self.is_idle(tile)]

    def is_idle(self, tile: Tile) -> bool:
        return tile.lease is not None and not tile.in_use and tile not in self.in_flight and tile not in self.wanted

    def distance(self, tile: Tile) -> int:
        """Sub-groups until its own is needed."""
        return (tile.turn - self.turn) % self.turns

    def take(self, tile: Tile, lease: Lease) -> None:
        tile.lease, tile.error = lease, None
        self._held[tile] = None
        self.used += tile.nbytes

    def free(self, tile: Tile) -> None:
        if tile.lease is not None:
            tile.lease.release()
            tile.lease = None
            del self._held[tile]
            self.used -= tile.nbytes

    def allocate(self, tile: Tile) -> bool:
        """Give a tile that is needed now what is free, or can be. Raises MemoryError where the system has none to pin."""
        while self.used + tile.nbytes > self.limit or not self._lease(tile):
            if not self._drop_spare():
                return False
        return True

    def allocate_ahead(self, tile: Tile, limit: int) -> bool:
        """Give a tile that is read ahead what is free, up to this limit, or held by one that is needed later."""
        while self.used + tile.nbytes > min(limit, self.limit):
            if not self._drop_spare(needed_after=tile):
                return False
        with contextlib.suppress(MemoryError):  # which is for whoever needs it now
            return self._lease(tile)
        return False

    def grow(self, tile: Tile) -> Lease:
        """Memory for a tile from the pool, beyond the limit. Waits for what others have leased; OutOfBuffers says what to set."""
        shortage = (
            f"the sub-group at hand needs {self.used} bytes of swap buffers and {tile.nbytes} more; buffer_count allows "
            f"{self.limit}, set it larger"
        )
        return lease_more(self._pool, tile.nbytes, [each.memory for each in self._held], shortage)

    def least_needed(self) -> Tile | None:
        """Of what is idle, one that it costs least to have go; it need not stay any more."""
        last = max(self.idle(), key=lambda tile: (not tile.resident, self.distance(tile)), default=None)
        if last is not None:
            last.resident = False
        return last

    def _lease(self, tile: Tile) -> bool:
        lease = self._pool.try_lease(tile.nbytes)
        if lease is not None:
            self.take(tile, lease)
        return lease is not None

    def _drop_spare(self, needed_after: Tile | None = None) -> bool:
        """Free one of those that their files have as well and that need not stay, the one needed last. Whether there was any."""
        spare = max((tile for tile in self.idle() if not tile.dirty and not tile.resident), key=self.distance, default=None)
        if spare is None or (needed_after is not None and self.distance(spare) <= self.distance(needed_after)):
            return False
        self.free(spare)
        return True
