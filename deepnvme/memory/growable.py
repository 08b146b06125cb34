"""Memory beyond the configured number of buffers, from the pool, or what to set where that has none."""

from __future__ import annotations

from collections.abc import Iterable

from .pool import BufferPool, Lease, OutOfBuffers

_PATIENCE_SECONDS = 300.0
"""How long others' leases are waited for: longer than any transfer takes, shorter than one takes a program to be hung."""


def lease_more(pool: BufferPool, nbytes: int, held: Iterable[Lease], shortage: str) -> Lease:
    """Lease ``nbytes``, waiting for others to give some back if there are any.

    ``held``: what the caller has, and will not give back meanwhile, whichever thread leased it. ``shortage``: begins the message
    of the OutOfBuffers that is raised where the pool has no room: at once, unless other threads have leases too.
    """
    try:
        return pool.lease(nbytes, timeout=_PATIENCE_SECONDS, keeping=held)
    except (OutOfBuffers, TimeoutError) as error:
        raise OutOfBuffers(f"{shortage}; {error}") from error
