"""Leases of memory beyond a user's configured number of buffers, with an error that says which setting to change."""

from __future__ import annotations

from collections.abc import Iterable

from .pool import BufferPool, Lease, OutOfBuffers

_PATIENCE_SECONDS = 300.0
"""How long to wait for others to release leases: longer than any transfer takes, not so long that the program seems to hang."""


def lease_more(pool: BufferPool, nbytes: int, held: Iterable[Lease], shortage: str) -> Lease:
    """Lease ``nbytes`` bytes, waiting up to 300 s for other threads to release memory if they have any leased.

    Args:
        pool: The pool to lease from.
        nbytes: Bytes to lease.
        held: Leases that the caller does not release while it waits, whichever thread leased them.
        shortage: The beginning of the message of the OutOfBuffers below.

    Raises:
        OutOfBuffers: If the pool has no room: at once if no other thread has leases, else after waiting.
    """
    try:
        return pool.lease(nbytes, timeout=_PATIENCE_SECONDS, keeping=held)
    except (OutOfBuffers, TimeoutError) as error:
        raise OutOfBuffers(f"{shortage}; {error}") from error
