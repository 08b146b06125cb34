"""Pinned memory for rows on their way between a drive and the cache."""

from __future__ import annotations

from collections import deque

import torch

from deepnvme.engine import Engine
from deepnvme.memory.alignment import padded

DEFAULT_STAGING_BYTES = 48 << 20
"""Of a table, for reads and writes together."""
_MOST_PART_BYTES = 1 << 20
_LEAST_PART_BYTES = 256 << 10
"""Smaller parts are too few reads at a time for a drive: rows of 4 KiB are 64 of them."""
_WANTED_PARTS = 8
_FEWEST_PARTS = 2
"""While one is copied, the other is read or written."""


class StagingPool:
    """Parts of equal size, which are used and given back. The memory is allocated when the first part is taken.

    Args:
        engine: Allocates the memory.
        nbytes: Bytes of all parts. Parts are smaller than 1 MiB where there would be fewer than 8 of them, but not smaller than
            256 KiB or ``row_bytes``; at least two are there, even if these are more than ``nbytes``.
        row_bytes: The least that a part has to hold.
        multiple: What the size of a part is a multiple of.
    """

    def __init__(self, engine: Engine, nbytes: int, row_bytes: int, multiple: int) -> None:
        self._engine = engine
        wanted = min(max(nbytes // _WANTED_PARTS, _LEAST_PART_BYTES), _MOST_PART_BYTES)
        self.part_bytes = max(wanted // multiple * multiple, padded(row_bytes, multiple))
        """Bytes of a part."""
        self.parts = max(nbytes // padded(self.part_bytes, 4096), _FEWEST_PARTS)
        """How many there are, with those in use."""
        self._free: deque[torch.Tensor] | None = None

    @property
    def free(self) -> int:
        """How many parts can be taken."""
        return self.parts if self._free is None else len(self._free)

    def take(self) -> torch.Tensor:
        """Return a free part, bytes of shape (part_bytes,). Raises MemoryError if the memory cannot be allocated."""
        if self._free is None:
            memory = self._engine.empty_pinned(self.parts * padded(self.part_bytes, 4096), torch.uint8)
            self._free = deque(part[: self.part_bytes] for part in memory.view(self.parts, -1))
        return self._free.popleft()

    def give_back(self, part: torch.Tensor) -> None:
        """Have a part be free again."""
        assert self._free is not None
        self._free.append(part)
