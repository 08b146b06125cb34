"""Names of a sub-group's blocks in the store, and which of them may be overwritten."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from deepnvme.store.tensor_store import TensorStore

    from .sub_group import SubGroup


def block_name(sub_group: SubGroup, number: int | None = None) -> str:
    """Return the store's name for a sub-group's block: the one of the last completed step, or the one with this number."""
    return f"{sub_group.index}.{sub_group.current if number is None else number}"


def image_name(sub_group: SubGroup) -> str:
    """Return the store's name for the copy of a sub-group's parameters before the step, from which the step is undone."""
    return f"{sub_group.index}.image"


class BlockVersions:
    """Chooses which block of a sub-group the next step writes, so that no block still needed is overwritten.

    A sub-group has two blocks that alternate: one of the last completed step, one that the next step writes. It has more while
    tensors of a ``state_dict`` are mapped from an older block: a mapping shows what is written to the file later, so such a
    block must not change.
    """

    def __init__(self, store: TensorStore) -> None:
        self._store = store
        self._mapped: dict[str, list[_Memory]] = {}
        self._more: dict[str, SubGroup] = {}

    def next_of(self, sub_group: SubGroup) -> int:
        """Return the lowest block number that is neither the sub-group's current block nor mapped by a live tensor."""
        number = 0
        while number == sub_group.current or self._is_mapped(block_name(sub_group, number)):
            number += 1
        if number > 1:
            self._more[block_name(sub_group, number)] = sub_group
        return number

    def map(self, ranges: Sequence[tuple[SubGroup, int, int]]) -> torch.Tensor:
        """Map bytes of sub-groups' current blocks as one uint8 tensor.

        The bytes do not change for as long as any tensor over the mapping lives: later steps write to other blocks.

        Args:
            ranges: (sub-group, first byte, number of bytes), with the alignment that :meth:`TensorStore.map_ranges` requires.
        """
        mapped = self._store.map_ranges([(block_name(sub_group), first, count) for sub_group, first, count in ranges])
        memory = _Memory(mapped)
        for sub_group, _, _ in ranges:
            name = block_name(sub_group)
            self._mapped[name] = [*(other for other in self._mapped.get(name, ()) if other.seen), memory]
        return mapped

    def tidy(self) -> None:
        """Delete blocks beyond a sub-group's two that no live tensor is mapped from any more. Blocks; raises OSError."""
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
    """A weak reference to a tensor's memory. ``seen`` tells whether the tensor, or any view of it, is alive."""

    def __init__(self, tensor: torch.Tensor) -> None:
        from torch.multiprocessing.reductions import StorageWeakRef

        self._storage: Any = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]

    @property
    def seen(self) -> bool:
        return not self._storage.expired()
