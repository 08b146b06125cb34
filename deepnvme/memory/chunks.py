"""The chunks of pinned memory that a buffer pool owns: those that are lent, and those that are free for reuse."""

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


def no_holder() -> None:
    """The ``holder`` of a free chunk. Returns None, which means that nobody uses the memory."""


class Claim:
    """The ``holder`` of a chunk while its lease is being made.

    It exists before the chunk is chosen, so that an exception at any point can give the chunk back.
    """

    __slots__ = ("chunk", "given_up")

    def __init__(self) -> None:
        self.chunk: PinnedChunk | None = None
        self.given_up = False

    def __call__(self) -> object:
        """Return None once the claim was given up, like a weak reference whose object is gone."""
        return None if self.given_up else self


class Holder(weakref.ref[memoryview]):
    """The ``holder`` of a leased chunk: a weak reference to the memoryview that every tensor over the lease keeps alive.

    It returns None once the memoryview is gone, which is when no tensor over the lease is left.
    """

    __slots__ = ("chunk",)

    chunk: PinnedChunk | None


class PinnedChunk:
    """One allocation of pinned memory. Its size is that of the first request that it served."""

    __slots__ = ("holder", "memory", "nbytes", "owner", "returned")

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.memory: Any = None
        """The op's buffer; None until the memory is pinned."""
        self.owner: threading.Thread | None = None
        """The thread that leased the chunk; None if it is free."""
        self.holder: Callable[[], object] = no_holder
        """Returns None once nobody uses the memory any more."""
        self.returned = 0.0
        """When the chunk became free (``time.monotonic()``)."""


class ChunkList:
    """The lent and the free chunks of a pool, and their sizes in bytes. Not thread-safe.

    Ctrl-C may interrupt any method at any point. A chunk is in at most one of the two collections, and is added to it by one step
    of the interpreter. So a chunk whose move was interrupted is in neither, and is unpinned. The byte counts are kept, and are
    counted anew after an update of them was interrupted.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.lent: set[PinnedChunk] = set()
        self._free: list[PinnedChunk] = []  # smallest first; of equal sizes, the last one used first: it may still be in a cache
        self._lent_bytes = self._free_bytes = 0
        self._changing = False

    @property
    def lent_bytes(self) -> int:
        """Bytes of the chunks that are lent out now, without the free ones."""
        if self._changing:
            self._count()
        return self._lent_bytes

    @property
    def allocated(self) -> int:
        """Bytes that are pinned: in lent and in free chunks."""
        return self.lent_bytes + self._free_bytes

    @property
    def last_counted(self) -> tuple[int, int]:
        """Bytes of the lent and of the free chunks as they were counted last. Unlike the others, for any thread at any time."""
        return self._lent_bytes, self._free_bytes

    def set_budget(self, nbytes: int) -> None:
        """Change the budget, and unpin free chunks that it has no room for any more."""
        self.budget = nbytes
        self.unpin_down_to(nbytes)

    def fits(self, nbytes: int) -> bool:
        """Return whether the budget allows to lend ``nbytes`` more bytes."""
        return self.lent_bytes + nbytes <= self.budget

    def lend(self, nbytes: int, claim: Claim) -> PinnedChunk:
        """Lend a chunk for a request that fits in the budget.

        Reuses a free chunk of about the requested size, or makes a new one, which the caller has to pin (its ``memory`` is None).
        Free chunks are unpinned first if the budget has no room for a new one.

        Args:
            nbytes: Bytes wanted. The chunk may be larger by up to 1/8.
            claim: Becomes the chunk's ``holder``.
        """
        at = bisect.bisect_left(self._free, nbytes, key=_nbytes)
        reused = at < len(self._free) and self._free[at].nbytes <= nbytes + nbytes // _SLACK
        if not reused:
            self.unpin_down_to(self.budget - nbytes)
        self._change()
        chunk = self._free.pop(at) if reused else PinnedChunk(nbytes)
        claim.chunk = chunk
        chunk.holder, chunk.owner = claim, threading.current_thread()
        self.lent.add(chunk)
        self._lent_bytes += chunk.nbytes
        self._free_bytes -= chunk.nbytes * reused
        self._changing = False
        return chunk

    def take_back(self, chunk: PinnedChunk) -> None:
        """Move a lent chunk to the free ones, for reuse.

        A chunk without pinned memory is dropped instead, and so is any chunk while more is pinned than the budget, which can have
        been lowered.
        """
        kept = chunk.memory is not None and self.allocated <= self.budget
        self._change()
        self.lent.remove(chunk)
        self._lent_bytes -= chunk.nbytes
        if kept:
            chunk.holder, chunk.owner = no_holder, None
            chunk.returned = time.monotonic()
            self._free.insert(bisect.bisect_left(self._free, chunk.nbytes, key=_nbytes), chunk)
            self._free_bytes += chunk.nbytes
        self._changing = False

    def unpin_down_to(self, nbytes: int) -> None:
        """Unpin the chunks that have been free for longest, until at most ``nbytes`` bytes are pinned or no chunk is free."""
        while self._free and self.allocated > nbytes:
            oldest = min(self._free, key=_returned)
            self._change()
            self._free.remove(oldest)
            self._free_bytes -= oldest.nbytes
            self._changing = False

    def _change(self) -> None:
        """Note that the byte counts are about to be wrong; the caller clears ``_changing`` when they are right again."""
        if self._changing:
            self._count()
        self._changing = True

    def _count(self) -> None:
        """Set both byte counts from the lists, after an interrupt has left them wrong."""
        self._lent_bytes = sum(map(_nbytes, self.lent))
        self._free_bytes = sum(map(_nbytes, self._free))
        self._changing = False


_nbytes: Callable[[PinnedChunk], int] = operator.attrgetter("nbytes")
_returned: Callable[[PinnedChunk], float] = operator.attrgetter("returned")
