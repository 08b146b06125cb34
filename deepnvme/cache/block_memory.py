"""Where blocks get their memory: leases of a buffer pool within a limit, or a tensor for one block."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from deepnvme.cache.block import Block, Memory
from deepnvme.memory.lease import Lease
from deepnvme.memory.pool import BufferPool, OutOfBuffers


class OwnMemory:
    """Memory allocated for one block, outside any pool. It is freed with the last tensor that views it."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self.buffer = buffer
        self.nbytes = buffer.nbytes

    def release(self) -> None:
        """Do nothing: the memory is freed with the last tensor over it."""


class PooledMemory:
    """Leases memory for blocks from a pool, up to a limit. Only the blocks in use at one time may exceed the limit.

    Args:
        pool: The pool to lease from; it may have other users.
        limit: Most bytes of all leases together. Blocks beyond a limit that was lowered stay until their memory is needed.
        shortage: Returns the beginning of the OutOfBuffers message if the pool has no room for a block. Called with the bytes
            leased so far and the block.
        separate_residents: If True, leases of resident blocks do not count against the limit.
    """

    def __init__(
        self, pool: BufferPool, limit: int, shortage: Callable[[int, Block], str], separate_residents: bool = False
    ) -> None:
        self.limit = limit
        self.separate_residents = separate_residents
        self._pool = pool
        self._shortage = shortage

    def take(self, block: Block) -> Lease | None:
        """Return a lease for the block, or None if the pool has no room. Never waits.

        Raises MemoryError if the system has too little memory to pin.
        """
        return self._pool.try_lease(block.nbytes)

    def grow(self, block: Block, held: Sequence[Memory]) -> Lease:
        """Lease memory for a block beyond the limit.

        Waits for other threads to release leases, but not for the leases in ``held``. Raises OutOfBuffers if the pool has no
        room.
        """
        try:
            self._pool.ensure_possible(block.nbytes, [lease for lease in held if isinstance(lease, Lease)])
            return self._pool.lease(block.nbytes)
        except OutOfBuffers as error:
            shortage = self._shortage(sum(memory.nbytes for memory in held), block)
            raise OutOfBuffers(f"{shortage}; {error}") from error
