"""Memory beyond the configured number of buffers, from the pool, or what to set where that has none."""

from __future__ import annotations

from deepnvme.swap.buffers import BufferPool, Lease, OutOfBuffers

_PATIENCE_SECONDS = 300.0
"""How long others' leases are waited for: longer than any transfer takes, shorter than one takes a program to be hung."""


def lease_more(pool: BufferPool, nbytes: int, held: int, shortage: str) -> Lease:
    """Lease ``nbytes``, waiting for others to give some back if there are any.

    ``held``: bytes of the pool that the caller has, and will not give back meanwhile, whichever thread leased them. ``shortage``:
    begins the message of the OutOfBuffers that is raised where the pool has no room.
    """
    try:
        return pool.lease(nbytes, timeout=_PATIENCE_SECONDS if pool.in_use > held else 0.0)
    except (OutOfBuffers, TimeoutError) as error:
        raise OutOfBuffers(f"{shortage}; {error}") from error
