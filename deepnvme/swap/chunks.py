"""Pinned memory within a budget: which of it is lent, and which is kept for reuse."""

from __future__ import annotations

import bisect
import operator
import threading
import time
from collections.abc import Callable
from typing import Any

_SLACK = 8
"""A free chunk serves a request that is smaller than it by up to an eighth of the request."""


def nobody() -> None:
    """What holds a chunk that is free."""


def lender() -> object:
    """What holds a chunk between its being chosen and its being lent."""
    return lender


class Chunk:
    """Pinned memory, as large as it was first asked for."""

    __slots__ = ("holder", "memory", "nbytes", "owner", "returned")

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.memory: Any = None
        """The op's buffer; None until it is pinned."""
        self.owner: threading.Thread | None = None
        """The thread that leased it."""
        self.holder: Callable[[], object] = nobody
        """Refers to the memoryview that every tensor over the lease holds; returns None when that is gone, and they with it."""
        self.returned = 0.0
        """When it became free."""


class Chunks:
    """Not thread-safe."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.lent: set[Chunk] = set()
        self.lent_bytes = 0
        self._free: list[Chunk] = []  # smallest first; of equals, the last one used first: it may still be in a cache
        self._free_bytes = 0

    @property
    def allocated(self) -> int:
        """Bytes that are pinned."""
        return self.lent_bytes + self._free_bytes

    def fits(self, nbytes: int) -> bool:
        return self.lent_bytes + nbytes <= self.budget

    def lend(self, nbytes: int) -> Chunk:
        """A chunk for a request that fits, to be pinned where none of those that are free is of its size."""
        at = bisect.bisect_left(self._free, nbytes, key=_nbytes)
        if at < len(self._free) and self._free[at].nbytes <= nbytes + nbytes // _SLACK:
            chunk = self._free.pop(at)
            self._free_bytes -= chunk.nbytes
        else:
            self.unpin_down_to(self.budget - nbytes)
            chunk = Chunk(nbytes)
        chunk.holder, chunk.owner = lender, threading.current_thread()
        self.lent.add(chunk)
        self.lent_bytes += chunk.nbytes
        return chunk

    def take_back(self, chunk: Chunk) -> None:
        """Of those lent: keep it for reuse, unless it could not be pinned, or the budget was lowered."""
        self.lent.remove(chunk)
        self.lent_bytes -= chunk.nbytes
        if chunk.memory is None or self.allocated + chunk.nbytes > self.budget:
            return
        chunk.holder, chunk.owner = nobody, None
        chunk.returned = time.monotonic()
        self._free.insert(bisect.bisect_left(self._free, chunk.nbytes, key=_nbytes), chunk)
        self._free_bytes += chunk.nbytes

    def unpin_down_to(self, nbytes: int) -> None:
        """Unpin what has been free for longest, until ``nbytes`` are allocated, or only what is in use."""
        while self._free and self.allocated > nbytes:
            chunk = min(self._free, key=_returned)
            self._free.remove(chunk)
            self._free_bytes -= chunk.nbytes


_nbytes = operator.attrgetter("nbytes")
_returned = operator.attrgetter("returned")
