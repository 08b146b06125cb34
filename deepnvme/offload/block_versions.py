"""Where a sub-group's blocks lie in the store, and which of them may be overwritten."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from deepnvme.store.tensor_store import TensorStore

    from .sub_group import SubGroup


def block_name(sub_group: SubGroup, number: int | None = None) -> str:
    """In the store, of its last whole step's block, or of the one with that number."""
    return f"{sub_group.index}.{sub_group.current if number is None else number}"


def image_name(sub_group: SubGroup) -> str:
    """In the store, of its parameters before the last step."""
    return f"{sub_group.index}.image"


class BlockVersions:
    """A sub-group has two blocks by turns, of the last whole step and of the next; more only while tensors are mapped from one
    that is neither: a mapping shows what is written to the file later, so that block has to stay as it is."""

    def __init__(self, store: TensorStore) -> None:
        self._store = store
        self._mapped: dict[str, list[_Memory]] = {}
        self._more: dict[str, SubGroup] = {}

    def next_of(self, sub_group: SubGroup) -> int:
        """The number of the block to be written: not the current one, and nobody's."""
        number = 0
        while number == sub_group.current or self._is_mapped(block_name(sub_group, number)):
            number += 1
        if number > 1:
            self._more[block_name(sub_group, number)] = sub_group
        return number

    def map(self, ranges: Sequence[tuple[SubGroup, int, int]]) -> torch.Tensor:
        """Bytes of current blocks, each (whose, first byte, count), as :meth:`TensorStore.map_ranges` has them. They stay as they
        are for as long as any tensor over them lives."""
        mapped = self._store.map_ranges([(block_name(sub_group), first, count) for sub_group, first, count in ranges])
        memory = _Memory(mapped)
        for sub_group, _, _ in ranges:
            name = block_name(sub_group)
            self._mapped[name] = [*(other for other in self._mapped.get(name, ()) if other.seen), memory]
        return mapped

    def tidy(self) -> None:
        """Give back the room of blocks that were needed beside a sub-group's two, and are no more."""
        for name, sub_group in list(self._more.items()):
            if name != block_name(sub_group) and not self._is_mapped(name):
                del self._more[name]
                if name in self._store:
                    self._store.delete(name).result()

    def _is_mapped(self, name: str) -> bool:
        memory = self._mapped.get(name)
        if memory is None:
            return False
        if any(each.seen for each in memory):
            return True
        del self._mapped[name]
        return False


class _Memory:
    """Of a tensor: whether that, or any view of it, is alive."""

    def __init__(self, tensor: torch.Tensor) -> None:
        from torch.multiprocessing.reductions import StorageWeakRef

        self._storage: Any = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]

    @property
    def seen(self) -> bool:
        return not self._storage.expired()
