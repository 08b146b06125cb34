"""Writing many small pieces in few large transfers: the ring of leased chunks that they are copied into."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

import torch

from deepnvme.engine import Future
from deepnvme.memory.alignment import PAGE
from deepnvme.memory.pool import BufferPool, Lease

DIRECT_FROM = 512 << 10
"""Least bytes of a piece of memory that gets its own transfer. Smaller pieces are copied together with their neighbours."""
CHUNK = 4 << 20
"""Bytes of a chunk: most bytes that are gathered for one transfer."""
CHUNKS = 4
"""Most chunks leased at a time: three keep a drive busy while the fourth is filled, or copied from."""


class Transfers:
    """Several transfers combined into one, in the order in which they were started. A lease can be released after all of them.

    Args:
        futures: Transfers that were started already.
        ended: Called with the bytes of each successful transfer, when it is removed from the queue.
    """

    def __init__(self, futures: Iterable[Future] = (), ended: Callable[[int], object] = lambda nbytes: None) -> None:
        self._futures = deque(futures)
        self._ended = ended

    def add(self, futures: Iterable[Future]) -> None:
        """Add transfers that were started elsewhere. They are waited for after the earlier ones."""
        self._futures += futures

    def start(self, function: Callable[..., Future], *arguments: object) -> Future:
        """Call ``function``, which starts a transfer, and return its future."""
        self._futures.append(function(*arguments))
        return self._futures[-1]

    def done(self) -> bool:
        """Return whether all transfers have ended. Never blocks."""
        return all(future.done() for future in self._futures)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait until all transfers have ended. Return the first error, or None."""
        errors = [future.exception(timeout) for future in self._futures]
        return next((error for error in errors if error is not None), None)

    def take_ended(self, most: int | None = None) -> None:
        """Remove ended transfers from the front of the queue. Raises the first error among them.

        While more than ``most`` transfers are left, waits for the first of them. With None, never waits.
        """
        while self._futures and (self._futures[0].done() or (most is not None and len(self._futures) > most)):
            self.end_first()

    def result(self) -> None:
        """Wait until all transfers have ended, and remove them.

        Raises the first error at once, while later transfers may still be in progress.
        """
        while self._futures:
            self.end_first()

    def end_first(self) -> None:
        """Wait until the transfer that was started first has ended, and drop it. Raises its error."""
        nbytes = self._futures[0].result()
        self._futures.popleft()
        self._ended(nbytes)


class Chunk:
    """A leased chunk of memory, and the transfers from or into it."""

    def __init__(self, lease: Lease) -> None:
        self.lease = lease
        self.transfers = Transfers()
        self.used = 0
        """Bytes from the start of the chunk that are in use."""

    @property
    def buffer(self) -> torch.Tensor:
        """The chunk's leased memory, one-dimensional uint8. Valid until :meth:`release`."""
        return self.lease.buffer

    def release(self) -> None:
        """Return the memory to the pool once the transfers have ended. Never blocks. Idempotent."""
        self.lease.release(after=self.transfers)


class ChunkRing:
    """Up to four chunks of leased memory, used in turn. A chunk is reused when all transfers from it have ended.

    The owner calls :meth:`release` at the end, whatever happens. Not thread-safe.

    Args:
        pool: Leases the chunks.
        nbytes: Bytes of each chunk.
        wait: Whether to wait for the pool if it has no memory for the first chunk. Set False if the caller holds leases that
            other threads may be waiting for.
    """

    def __init__(self, pool: BufferPool, nbytes: int, wait: bool) -> None:
        self._lease = pool.lease if wait else pool.try_lease
        self._lease_more = pool.try_lease
        self.nbytes = nbytes
        """Bytes of each chunk."""
        self._chunks: deque[Chunk] = deque()  # the one that is to be used again first is at the left

    def lease(self) -> Chunk | None:
        """Lease one more chunk. Return None if the ring has four chunks, or if the pool has no memory free for another one.

        Raises:
            OutOfBuffers: If the ring has no chunk yet, and waiting for the pool cannot help.
        """
        if len(self._chunks) == CHUNKS:
            return None
        lease = self._lease_more if self._chunks else self._lease
        leased = lease(self.nbytes)
        if leased is None:
            return None
        self._chunks.append(Chunk(leased))
        return self._chunks[-1]

    def memory(self, begin: int, end: int) -> torch.Tensor | None:
        """Return memory for the bytes [begin, end) of a file, in a chunk with room for them.

        Blocks while all chunks are in use. The memory has the same offset within a page as ``begin`` has in the file, so that
        direct I/O needs no further copy.

        Returns:
            The memory, with undefined contents. None if the ring does not wait and the pool has no memory free.
        """
        chunk = self._chunks[-1] if self._chunks else None
        start = 0 if chunk is None else chunk.used + (begin - chunk.used) % PAGE
        if chunk is None or start + end - begin > self.nbytes:
            chunk = self.lease()
            if chunk is None and self._chunks:
                chunk = self._chunks[0]
                chunk.transfers.exception()
                chunk.transfers = Transfers()
                self._chunks.rotate(-1)
            if chunk is None:
                return None
            start = begin % PAGE
        chunk.used = start + end - begin
        return chunk.buffer[start : chunk.used]

    def sent(self, futures: Iterable[Future]) -> None:
        """Record the transfers of the memory that :meth:`memory` returned last: it is not reused until they have ended."""
        self._chunks[-1].transfers.add(futures)

    def release(self) -> None:
        """Release each chunk when the transfers with it have ended. Never blocks. Idempotent."""
        for chunk in self._chunks:
            chunk.release()
