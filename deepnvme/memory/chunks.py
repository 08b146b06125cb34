"""Pinned memory within a budget: which of it is lent, and which is kept for reuse."""

from __future__ import annotations

import bisect
import operator
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

_SLACK = 8
"""A free chunk serves a request that is smaller than it by up to an eighth of the request."""


def nobody() -> None:
    """The ``holder`` of a free chunk."""


class Claim:
    """Reserves a chunk while its lease is being made. It exists before the chunk is chosen, so an exception at any point
    can give the chunk back.
    """

    __slots__ = ("chunk", "given_up")

    def __init__(self) -> None:
        self.chunk: PinnedChunk | None = None
        self.given_up = False

    def __call__(self) -> object:
        return None if self.given_up else self


class Holder(weakref.ref[memoryview]):
    """Refers to the memoryview that every tensor over a lease holds; returns None when that is gone, and they with it."""

    __slots__ = ("chunk",)

    chunk: PinnedChunk | None


class PinnedChunk:
    """Pinned memory, as large as it was first asked for."""

    __slots__ = ("holder", "memory", "nbytes", "owner", "returned")

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.memory: Any = None
        """The op's buffer; None until it is pinned."""
        self.owner: threading.Thread | None = None
        """The thread that leased it."""
        self.holder: Callable[[], object] = nobody
        """Returns None when nobody uses the memory any more."""
        self.returned = 0.0
        """When it became free."""


class ChunkList:
    """Those that are lent, and those that are free. Not thread-safe.

    Ctrl-C may end any method anywhere. A chunk is in one of the two at most, and is put there by one step of the interpreter: one
    that was on its way is in neither, and unpinned. How many bytes there are is noted, and counted anew where
    that was interrupted.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.lent: set[PinnedChunk] = set()
        self._free: list[PinnedChunk] = []  # smallest first; of equals, the last one used first: it may still be in a cache
        self._lent_bytes = self._free_bytes = 0
        self._changing = False

    @property
    def lent_bytes(self) -> int:
        if self._changing:
            self._count()
        return self._lent_bytes

    @property
    def allocated(self) -> int:
        """Bytes that are pinned."""
        return self.lent_bytes + self._free_bytes

    def fits(self, nbytes: int) -> bool:
        return self.lent_bytes + nbytes <= self.budget

    def lend(self, nbytes: int, claim: Claim) -> PinnedChunk:
        """A chunk for a request that fits, to be pinned where none of those that are free is of its size. ``claim`` holds it."""
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
        """Of those lent: keep it for reuse, unless it could not be pinned, or the budget was lowered."""
        kept = chunk.memory is not None and self.allocated <= self.budget
        self._change()
        self.lent.remove(chunk)
        self._lent_bytes -= chunk.nbytes
        if kept:
            chunk.holder, chunk.owner = nobody, None
            chunk.returned = time.monotonic()
            self._free.insert(bisect.bisect_left(self._free, chunk.nbytes, key=_nbytes), chunk)
            self._free_bytes += chunk.nbytes
        self._changing = False

    def unpin_down_to(self, nbytes: int) -> None:
        """Unpin what has been free for longest, until ``nbytes`` are allocated, or only what is in use."""
        while self._free and self.allocated > nbytes:
            oldest = min(self._free, key=_returned)
            self._change()
            self._free.remove(oldest)
            self._free_bytes -= oldest.nbytes
            self._changing = False

    def _change(self) -> None:
        if self._changing:
            self._count()
        self._changing = True

    def _count(self) -> None:
        self._lent_bytes = sum(map(_nbytes, self.lent))
        self._free_bytes = sum(map(_nbytes, self._free))
        self._changing = False


_nbytes: Callable[[PinnedChunk], int] = operator.attrgetter("nbytes")
_returned: Callable[[PinnedChunk], float] = operator.attrgetter("returned")
