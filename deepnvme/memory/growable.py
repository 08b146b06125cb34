"""A lease that grows: it is replaced by a larger one."""

from __future__ import annotations

import torch

from .pool import BufferPool, Lease


class GrowableLease:
    """A lease that is replaced by a larger one when more bytes are needed."""

    def __init__(self, pool: BufferPool) -> None:
        self._pool = pool
        self._lease: Lease | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the current lease; 0 if there is none."""
        return 0 if self._lease is None else self._lease.nbytes

    def take(self, nbytes: int) -> torch.Tensor:
        """Return ``nbytes`` bytes with undefined contents. Tensors from earlier calls must not be used any more.

        Blocks if a larger lease is needed and the pool has no room, as :meth:`BufferPool.lease` does.
        """
        if self._lease is None or self._lease.nbytes < nbytes:
            self.release()
            self._lease = self._pool.lease(max(nbytes, 1))
        return self._lease.buffer[:nbytes]

    def release(self) -> None:
        """Return the memory to the pool. Tensors from :meth:`take` must not be used any more. Idempotent."""
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.release()
