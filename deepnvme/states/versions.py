"""Versions of a block on the drive: that of the last completed step, and the one that the next step writes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from deepnvme.store.tensor_store import TensorStore


class Versioned(Protocol):
    """An object stored in numbered versions: a sub-group's states, or a block of parameters."""

    @property
    def index(self) -> int | str:
        """Identifies the object in the store."""

    @property
    def current(self) -> int | None:
        """Number of the newest version, which is on the drive or being written; None if there is none."""


def block_name(of: Versioned, number: int | None = None) -> str:
    """Return the store's name of a version: the newest, or the one with this number."""
    return f"{of.index}.{of.current if number is None else number}"


class BlockVersions:
    """Chooses which version the next step writes, so that none still needed is overwritten.

    There are two that alternate: one of the last completed step, one that the next step writes. There are more while tensors of
    a ``state_dict`` are mapped from an older one: a mapping shows what is written to the file later, so that must not change.
    """

    def __init__(self, store: TensorStore) -> None:
        self._store = store
        self._mapped: dict[str, list[Any]] = {}
        self._more: dict[str, Versioned] = {}

    def next_of(self, of: Versioned) -> int:
        """Return the lowest version number that is neither the current version's nor mapped by a live tensor."""
        number = 0
        while number == of.current or self._is_mapped(block_name(of, number)):
            number += 1
        if number > 1:
            self._more[block_name(of, number)] = of
        return number

    def write(self, of: Versioned, number: int, content: torch.Tensor) -> None:
        """Write a version. Blocks; raises OSError."""
        self._store.put(block_name(of, number), content).result()

    def map(self, ranges: Sequence[tuple[Versioned, int, int]]) -> torch.Tensor:
        """Map bytes of current versions as one uint8 tensor.

        The bytes do not change for as long as any tensor over the mapping lives: later steps write to others.

        Args:
            ranges: (of what, first byte, number of bytes), with the alignment that :meth:`TensorStore.map_ranges` requires.
        """
        mapped = self._store.map_ranges([(block_name(of), first, count) for of, first, count in ranges])
        memory: Any = StorageWeakRef(mapped.untyped_storage())  # type: ignore[no-untyped-call]
        for of, _, _ in ranges:
            name = block_name(of)
            self._mapped[name] = [*(other for other in self._mapped.get(name, ()) if not other.expired()), memory]
        return mapped

    def tidy(self) -> None:
        """Delete the extra versions that no live tensor is mapped from any more."""
        for name, of in list(self._more.items()):
            if name != block_name(of) and not self._is_mapped(name):
                del self._more[name]
                if name in self._store:
                    self._store.delete(name).result()

    def _is_mapped(self, name: str) -> bool:
        """Return whether a tensor over this version, or any view of it, is alive."""
        return any(not memory.expired() for memory in self._mapped.get(name, ()))
