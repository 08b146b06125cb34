"""A lease that grows: it is replaced by a larger one."""

from __future__ import annotations

import torch

from deepnvme.telemetry.high_water_mark import HighWaterMark

from .pool import BufferPool, Lease


class GrowableLease:
    """A lease that is replaced by a larger one when more bytes are needed.

    Args:
        pool: The pool to lease from.
        leased: Counts the bytes of the lease.
    """

    def __init__(self, pool: BufferPool, leased: HighWaterMark) -> None:
        self._pool, self._leased = pool, leased
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
            self._leased.add(self._lease.nbytes)
        return self._lease.buffer[:nbytes]

    def release(self) -> None:
        """Return the memory to the pool. Tensors from :meth:`take` must not be used any more. Idempotent."""
        lease, self._lease = self._lease, None
        if lease is not None:
            self._leased.add(-lease.nbytes)
            lease.release()
