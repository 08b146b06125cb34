"""Batches whose successors' rows are read while they are worked on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Generic, Protocol, TypeVar

import torch

Batch = TypeVar("Batch")


class Prefetching(Protocol):
    """What has rows that can be read ahead: an embedding on a drive, or a table."""

    def prefetch(self, ids: torch.Tensor) -> None:
        """Start reading the rows of ids into memory; return at once."""


class Lookahead(Generic[Batch]):
    """The batches of a loader, in their order: before one is returned, the rows of the next are being read into memory.

    >>> for batch in Lookahead(loader, lambda batch: {users: batch.users, items: batch.items}):
    ...     train(batch)

    What is trained meanwhile is seen by the next batch: results are the same as without it. The memory budget of each embedding
    has to have room for the rows of two batches. One batch more of the loader is in memory.

    Args:
        loader: Returns batches, such as a DataLoader.
        rows: Returns for a batch the ids of which rows will be read, by embedding or table.
    """

    def __init__(self, loader: Iterable[Batch], rows: Callable[[Batch], Mapping[Prefetching, torch.Tensor]]) -> None:
        self._loader, self._rows = loader, rows

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Batch]:
        batches = iter(self._loader)
        try:
            batch = next(batches)
        except StopIteration:
            return
        for following in batches:
            for embedding, ids in self._rows(following).items():
                embedding.prefetch(ids)
            yield batch
            batch = following
        yield batch
