"""What comes from the drive, made ready for use while the next is read."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from deepnvme.swap.futures import StoreFuture

    from .fetching import Reading
    from .weight_store import WeightStore

_THREADS = 2
"""Checksums of a drive that reads 3 GB/s take more than one: 2.5 GB/s of a core."""


class Arrivals:
    """The extents of a store, as a :class:`Fetcher` reads them. The first time that one is read, its checksum is looked at, if
    the store was opened so: by threads, since it takes as long as reading."""

    def __init__(self, store: WeightStore) -> None:
        self._store = store
        self._seen: set[str] = set()
        self._threads = ThreadPoolExecutor(_THREADS, "deepnvme-weights")

    def nbytes(self, extent: str) -> int:
        """Of the memory that it is read into."""
        return self._store.extents[extent].nbytes

    def read(self, extent: str, memory: torch.Tensor) -> Reading:
        """Start reading an extent into ``nbytes`` bytes; return at once."""
        reading = self._store.read(extent, memory)
        if extent in self._seen:
            return reading
        self._seen.add(extent)
        return self._threads.submit(_finish, [reading])

    def close(self) -> None:
        """End the threads. Waits for them."""
        self._threads.shutdown()


def _finish(only: list[StoreFuture[torch.Tensor]]) -> None:
    """Takes it out of the list: once this ends, no tensor may be kept by the thread, which is not done with its arguments then."""
    error = only.pop().exception()
    if error is not None:
        raise error
