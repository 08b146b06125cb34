"""One region of pinned memory, lent in parts of any size."""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any

import torch

from deepnvme._interrupts import defer_interrupts
from deepnvme.memory.alignment import padded
from deepnvme.memory.pool import pinned
from deepnvme.store.extents import ExtentMap


class PinnedArena:
    """Lends parts of one region of pinned memory. To be used by one thread at a time. Ctrl-C waits for the end of each method.

    Unlike a :class:`deepnvme.memory.pool.BufferPool`, whose chunks keep the size of their first lease, it needs no new pages when
    sizes alternate. The region is pinned when something is lent for the first time, and kept until :meth:`trim`.

    Args:
        nbytes: Bytes of the region, rounded down to whole pages.
    """

    def __init__(self, nbytes: int) -> None:
        self.resize(nbytes)

    def resize(self, nbytes: int) -> None:
        """From now on, lend parts of a new region of ``nbytes`` bytes. Tensors over the old region stay valid."""
        self.nbytes = nbytes - nbytes % padded(1)
        self._region: Any = None
        self._extents = ExtentMap()
        self._ended: deque[_Loan] = deque()  # whose tensors are gone
        self._loans: dict[int, _Loan] = {}  # offset -> who has the part that begins there

    @property
    def allocated(self) -> int:
        """Bytes of pinned memory held now: ``nbytes`` from the first :meth:`lend` until :meth:`trim`, else 0."""
        return 0 if self._region is None else self.nbytes

    def lend(self, nbytes: int) -> torch.Tensor | None:
        """Return a one-dimensional uint8 tensor, or None if there is no room.

        The tensor is page-aligned, and has its own storage. Its memory is lent again once no tensor over it exists.

        Raises:
            OutOfBuffers: If the system has not so much memory to pin.
        """
        with defer_interrupts():
            self._take_back()
            length = padded(nbytes)
            if not 0 < length <= self.nbytes:
                return None
            if self._region is None:
                self._region = pinned(self.nbytes)
            offset = self._extents.take(length)
            if offset + length > self.nbytes:
                self._extents.give_back(offset, length)
                return None
            part = memoryview(self._region)[offset : offset + nbytes]
            loan = _Loan(part, self._ended.append)
            loan.extent = offset, length
            self._loans[offset] = loan
            with torch.inference_mode(False):  # a tensor made in inference mode cannot be written to outside of it
                return torch.frombuffer(part, dtype=torch.uint8)

    def lend_beyond(self, nbytes: int) -> torch.Tensor:
        """Return memory as :meth:`lend` does or, if there is no room, a separate region. Raises OutOfBuffers."""
        lent = self.lend(nbytes)
        if lent is None:
            lent = PinnedArena(padded(nbytes)).lend(nbytes)
            assert lent is not None
        return lent

    def trim(self) -> None:
        """Unpin the region if nothing of it is lent."""
        with defer_interrupts():
            self._take_back()
            if not self._loans:
                self._region = None

    def _take_back(self) -> None:
        while self._ended:
            loan = self._ended.popleft()
            offset, length = loan.extent
            del self._loans[offset]
            self._extents.give_back(offset, length)


class _Loan(weakref.ref[memoryview]):
    """A weak reference to the memoryview that all tensors over a part keep alive.

    Its callback is no Python code: a finalizer in Python would swallow a Ctrl-C.
    """

    __slots__ = ("extent",)

    extent: tuple[int, int]
