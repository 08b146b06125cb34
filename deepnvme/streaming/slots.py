"""Memory that extents are read into: few slots of one size, and what is to stay."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from deepnvme.swap.buffers import BufferPool
from deepnvme.swap.extents import padded
from deepnvme.swap.memory import empty_aligned

if TYPE_CHECKING:
    import torch

    from deepnvme.swap.lease import Ending


class Slot(Protocol):
    """Memory on loan."""

    @property
    def buffer(self) -> torch.Tensor:
        """Bytes (uint8, one dimension)."""

    def release(self, after: Ending | None = None) -> None:
        """Give it back; ``after``: when that has ended. Somebody else gets it when no tensor over it is left."""


class Slots(Protocol):
    """See :class:`PinnedSlots`."""

    count: int

    def lease(self, limit: int) -> Slot | None: ...

    def memory(self, nbytes: int) -> torch.Tensor: ...


class PinnedSlots:
    """Slots of pinned host memory, from a pool of their own, so that after the first few nothing is pinned anew.

    ``nbytes``: of each. ``count``: how many there are, unless a lease allows more.
    """

    def __init__(self, nbytes: int, count: int) -> None:
        self.count = count
        self._nbytes = max(nbytes, 1)
        self._size = padded(self._nbytes)
        self._pool = BufferPool(count * self._size)

    def lease(self, limit: int) -> Slot | None:
        """A slot, or None if ``limit`` are lent, or seen by tensors of somebody. Never waits, but the first ones are pinned."""
        if self._pool.budget != limit * self._size:
            self._pool.set_budget(limit * self._size)
        return self._pool.try_lease(self._nbytes)

    def memory(self, nbytes: int) -> torch.Tensor:
        """Memory beside the slots, for as long as it is wanted."""
        return empty_aligned(nbytes)
