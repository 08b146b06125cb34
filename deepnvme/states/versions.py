"""Versions of a block on the drive: one of the last completed step, and one that the next step writes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from deepnvme._interrupts import defer_interrupts
from deepnvme.memory.alignment import PAGE
from deepnvme.store.tensor_store import TensorStore

from .counted_io import StoredBlock
from .sub_group import BlockSection


class Versioned(Protocol):
    """An object stored in numbered versions: a sub-group's states, or a block of parameters."""

    @property
    def index(self) -> int | str:
        """Identifies the object in the store."""

    @property
    def current(self) -> int | None:
        """Number of the newest version, which is on the drive or being written; None if there is none."""


def block_name(versioned: Versioned, number: int | None = None) -> str:
    """Return the name of a version in the store: of the version ``number``, or of the newest one if it is None."""
    return f"{versioned.index}.{versioned.current if number is None else number}"


class BlockVersions:
    """Chooses which version of a block the next step writes, so that no version still needed is overwritten.

    Normally two versions alternate: one has the last completed step, the next step writes the other. While tensors of a
    ``state_dict`` are mapped from a version, it is not written, because a mapping would show the new bytes; a further version
    is used then.

    Args:
        store: The store that holds the versions.
    """

    def __init__(self, store: TensorStore) -> None:
        self._store = store
        self._mapped: dict[str, list[Any]] = {}
        self._more: dict[str, Versioned] = {}

    def next_of(self, versioned: Versioned) -> int:
        """Return the lowest version number that is neither the current version's nor mapped by a live tensor."""
        number = 0
        while number == versioned.current or self._is_mapped(block_name(versioned, number)):
            number += 1
        if number > 1:
            self._more[block_name(versioned, number)] = versioned
        return number

    def write(self, versioned: Versioned, number: int, content: torch.Tensor) -> None:
        """Write ``content`` as version ``number`` of ``versioned``. Blocks. Raises OSError."""
        self._store.put(block_name(versioned, number), content).result()

    def verify(self, versioned: Versioned) -> None:
        """Read the current version of ``versioned`` to verify its checksum. Blocks. Raises CorruptTensor."""
        self._store.get(block_name(versioned)).result()

    def map(self, sections: Sequence[tuple[Versioned, BlockSection]]) -> torch.Tensor:
        """Map sections of current versions as one 1-D tensor of the sections' dtype.

        The values do not change while any tensor over the mapping is alive: later steps write other versions.

        Args:
            sections: (object, section of its current version). All but the first begin on a page, and all but the last end on
                one. The tensor has padding at its end.
        """
        first = sections[0][1]
        inside = first.offset % PAGE
        ranges = [(block_name(owner), each.offset - inside, each.nbytes + inside) for owner, each in sections]
        mapped = self._store.map_ranges(ranges)
        with defer_interrupts():  # in torch's constructor, Ctrl-C would leave a reference that cannot be freed
            memory: Any = StorageWeakRef(mapped.untyped_storage())  # type: ignore[no-untyped-call]
            for name, _, _ in ranges:
                self._mapped[name] = [*(other for other in self._mapped.get(name, ()) if not other.expired()), memory]
        return mapped[inside:].view(first.dtype)

    def tidy(self) -> None:
        """Delete the versions beyond the usual two that no live tensor is mapped from any more. Blocks."""
        for name, owner in list(self._more.items()):
            if name != block_name(owner) and not self._is_mapped(name):
                del self._more[name]
                if name in self._store:
                    self._store.delete(name).result()

    def _is_mapped(self, name: str) -> bool:
        """Return whether any tensor over a mapping of this version is alive."""
        return any(not memory.expired() for memory in self._mapped.get(name, ()))


class VersionedBlock(StoredBlock):
    """A block whose steps can be undone: a step writes a new version beside that of the last completed step.

    Args:
        index: Identifies the block's versions in the store.
        content_bytes: Bytes of each version.
    """

    def __init__(self, index: str, content_bytes: int) -> None:
        self.index = index
        """Identifies the block's versions in the store."""
        self.current = self._committed = 0
        """Number of the newest version."""
        self.changes = 0
        """Number of times that a step has changed the block or was undone."""
        super().__init__(block_name(self), content_bytes)
        self.stored = False

    @property
    def uncommitted(self) -> bool:
        """Whether the newest version is not that of the last completed step."""
        return self.current != self._committed

    def changed(self, number: int) -> None:
        """Set the newest version to ``number``: the next read or write of the block uses that version."""
        self.changes += 1
        self.current = number
        self.rename(block_name(self))

    def commit(self) -> None:
        """Record that the step that wrote the newest version is completed."""
        self._committed = self.current

    def undo(self) -> None:
        """Return to the version of the last completed step: the next read of the block reads that version."""
        self.changed(self._committed)
