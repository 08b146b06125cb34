"""The places that sub-groups pass through, one after the other."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from deepnvme.memory.pool import BufferPool, Lease
    from deepnvme.store.futures import StoreFuture

    from .sub_group import SubGroup


class GrowableLease:
    """Leased memory that is replaced where more is needed."""

    def __init__(self, pool: BufferPool) -> None:
        self._pool = pool
        self._lease: Lease | None = None

    def take(self, nbytes: int) -> torch.Tensor:
        """So many bytes, of any content. What was taken before is gone."""
        if self._lease is None or self._lease.nbytes < nbytes:
            self.release()
            self._lease = self._pool.lease(max(nbytes, 1))
        return self._lease.buffer[:nbytes]

    def release(self) -> None:
        """Give the memory back."""
        lease, self._lease = self._lease, None  # first: what is released must not be found here, even after Ctrl-C
        if lease is not None:
            lease.release()


@dataclass
class SubGroupSlot:
    """A place in the ring."""

    block: GrowableLease
    image: GrowableLease
    holds: SubGroup | None = None
    """Whose block, as it is on the drive or is being read or written."""
    content: torch.Tensor | None = None
    reading: StoreFuture[torch.Tensor] | None = None
    writing: list[StoreFuture[int]] = field(default_factory=list)

    @property
    def busy(self) -> bool:
        """Whether its memory is under transfer."""
        self.writing = [future for future in self.writing if not _ended(future)]
        return self.reading is not None or bool(self.writing)


def _ended(future: StoreFuture[int]) -> bool:
    """Whether it has. Raises what it ended with."""
    if not future.done():
        return False
    future.result()
    return True
