"""The chunks of pinned memory that a buffer pool owns: chunks that are lent, and free chunks for reuse."""

from __future__ import annotations

import bisect
import operator
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

_SLACK = 8
"""A free chunk is reused for a smaller request if it is larger by at most 1/8 of the request."""


class LeaseViewRef(weakref.ref[memoryview]):
    """A weak reference to the memoryview that every tensor over a lease keeps alive.

    The reference stores the chunk, so its callback needs no Python code to find the chunk: it can be a C function.
    """

    __slots__ = ("chunk",)

    chunk: PinnedChunk


class PinnedChunk:
    """One allocation of pinned memory. Its size is that of the first request that it served."""

    __slots__ = ("caller", "last_view", "memory", "nbytes", "returned", "thread")

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.memory: Any = None
        """The op's buffer; None until the memory is pinned."""
        self.thread: threading.Thread | None = None
        """The thread that leased the chunk; None if it is free, or its lease has been released."""
        self.caller = ""
        """Which module and thread leased the chunk, for errors."""
        self.last_view: LeaseViewRef | None = None
        """Weak reference that becomes dead when no tensor over the lease is alive any more. None while the chunk is free."""
        self.returned = 0.0
        """When the chunk became free (``time.monotonic()``)."""


class ChunkList:
    """The lent and the free chunks of a pool, and their sizes in bytes. Not thread-safe."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.lent: set[PinnedChunk] = set()
        self._free: list[PinnedChunk] = []  # smallest first; of equal sizes, the last one used first: it may still be in a cache
        self.lent_bytes = 0
        self.free_bytes = 0

    @property
    def allocated(self) -> int:
        """Bytes that are pinned: in lent and in free chunks."""
        return self.lent_bytes + self.free_bytes

    def set_budget(self, nbytes: int) -> None:
        """Change the budget, and unpin the free chunks that exceed it."""
        self.budget = nbytes
        self.unpin_down_to(nbytes)

    def fits(self, nbytes: int) -> bool:
        """Return whether the budget allows to lend ``nbytes`` more bytes."""
        return self.lent_bytes + nbytes <= self.budget

    def lend(self, nbytes: int, thread: threading.Thread, caller: str) -> PinnedChunk:
        """Lend a chunk for a request that fits in the budget.

        Reuses a free chunk of about the requested size, or makes a new one, which the caller has to pin (its ``memory`` is None).
        Free chunks are unpinned first if the budget has no room for a new one.

        Args:
            nbytes: Bytes wanted. The chunk may be larger by up to 1/8.
            thread: The thread that leases.
            caller: Which module and thread lease, for errors.
        """
        at = bisect.bisect_left(self._free, nbytes, key=_nbytes)
        if at < len(self._free) and self._free[at].nbytes <= nbytes + nbytes // _SLACK:
            chunk = self._free.pop(at)
            self.free_bytes -= chunk.nbytes
        else:
            self.unpin_down_to(self.budget - nbytes)
            chunk = PinnedChunk(nbytes)
        chunk.thread, chunk.caller = thread, caller
        self.lent.add(chunk)
        self.lent_bytes += chunk.nbytes
        return chunk

    def take_back(self, chunk: PinnedChunk) -> None:
        """Move a lent chunk to the free chunks, for reuse.

        The chunk is dropped instead if its memory was never pinned, or if more bytes are pinned than a lowered budget allows.
        """
        kept = chunk.memory is not None and self.allocated <= self.budget
        self.lent.discard(chunk)
        self.lent_bytes -= chunk.nbytes
        chunk.thread = chunk.last_view = None
        if kept:
            chunk.returned = time.monotonic()
            self._free.insert(bisect.bisect_left(self._free, chunk.nbytes, key=_nbytes), chunk)
            self.free_bytes += chunk.nbytes

    def unpin_down_to(self, nbytes: int) -> None:
        """Unpin the chunks that have been free for longest, until at most ``nbytes`` bytes are pinned or no chunk is free."""
        while self._free and self.allocated > nbytes:
            oldest = min(self._free, key=_returned)
            self._free.remove(oldest)
            self.free_bytes -= oldest.nbytes


_nbytes: Callable[[PinnedChunk], int] = operator.attrgetter("nbytes")
_returned: Callable[[PinnedChunk], float] = operator.attrgetter("returned")
