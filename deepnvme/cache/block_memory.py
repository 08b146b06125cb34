"""Memory of blocks: leases of a pool within a limit, or memory of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from deepnvme.cache.block import Block, Memory
from deepnvme.memory.growable import lease_more
from deepnvme.memory.lease import Lease
from deepnvme.memory.pool import BufferPool


class OwnMemory:
    """Memory made for one block: it ends with the last tensor over it."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self.buffer = buffer
        self.nbytes = buffer.nbytes

    def release(self) -> None:
        """Do nothing: the memory is freed with the last tensor over it."""


class PooledMemory:
    """Leases of a pool, up to a limit that is exceeded only if the blocks used at a time need more.

    Args:
        pool: Where memory is leased; others may use it as well.
        limit: Bytes of all leases.
        shortage: Given the bytes held and a block, returns the beginning of the message if the pool has no room for it.
        separate_residents: Whether the leases of residents do not count against the limit.
    """

    def __init__(
        self, pool: BufferPool, limit: int, shortage: Callable[[int, Block], str], separate_residents: bool = False
    ) -> None:
        self.limit = limit
        self.separate_residents = separate_residents
        self._pool = pool
        self._shortage = shortage

    def set_limit(self, nbytes: int) -> None:
        """Change the limit. What is held beyond it stays until its memory is needed."""
        self.limit = nbytes

    def take(self, block: Block) -> Lease | None:
        """Return a lease, or None if the pool has no room. Never waits.

        Raises MemoryError if the system has not so much memory to pin.
        """
        return self._pool.try_lease(block.nbytes)

    def grow(self, block: Block, held: Sequence[Memory]) -> Lease:
        """Lease memory for a block although that exceeds the limit of all leases.

        Waits for other threads to release theirs, not for those in ``held``. Raises OutOfBuffers if the pool has no room.
        """
        shortage = self._shortage(sum(memory.nbytes for memory in held), block)
        return lease_more(self._pool, block.nbytes, [lease for lease in held if isinstance(lease, Lease)], shortage)
