"""Present offloaded states as ``optimizer.state``, with tensors mapped from the drive."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch

from deepnvme.memory.alignment import PAGE
from deepnvme.store.tensor_store import TensorStore

from .block_versions import BlockVersions, block_name
from .partition import distributed_like, local_of
from .resident_blocks import ResidentBlocks
from .sub_group import MASTER, SubGroup, copied


class OffloadedStates(MutableMapping[Any, Any]):
    """``optimizer.state`` of an offloaded optimizer: a read-only mapping from parameter to its state.

    Tensors are memory-mapped from the drive when a parameter's state is read. They keep their values when further steps are
    made, and changing them changes nothing on the drive. Parameters that were never stepped are missing.

    Raises TypeError for setting or deleting an item.
    """

    def __init__(
        self,
        pieces: Mapping[torch.Tensor, Sequence[tuple[SubGroup, int]]],
        store: TensorStore,
        blocks: BlockVersions,
        residents: ResidentBlocks,
        check: Callable[[], None],
    ) -> None:
        """Present the states of ``pieces``.

        Args:
            pieces: Parameter -> (sub-group, index of the piece). The caller may add to it.
            store: Where blocks are.
            blocks: Maps the blocks, and keeps mapped ones from being overwritten.
            residents: Writes blocks that are only in memory, so that they can be mapped.
            check: Called before states are read; raises if they cannot be read now.
        """
        self._check = check
        self._pieces, self._store, self._blocks, self._residents = pieces, store, blocks, residents

    def __getitem__(self, param: torch.Tensor) -> dict[str, Any]:
        pieces = self._pieces[param]
        if not self._has(param):
            raise KeyError(param)
        self._check()
        local = local_of(param)
        found: dict[str, Any] = {
            key: distributed_like(param, value) if isinstance(value, torch.Tensor) and value.shape == local.shape else value
            for key, value in copied(pieces[0][0].small[pieces[0][1]]).items()
        }
        keys = [section.key for section in pieces[0][0].sections(pieces[0][1])]
        for sub_group, _ in pieces:
            self._residents.write(sub_group)
        for number, key in enumerate(keys):
            sections = [(sub_group, list(sub_group.sections(index))[number]) for sub_group, index in pieces]
            first = sections[0][1]
            inside = first.offset % PAGE
            mapped = self._blocks.map([(each, section.offset - inside, section.nbytes + inside) for each, section in sections])
            whole = mapped[inside:].view(first.dtype)
            if len(pieces) > 1 or tuple(local.shape) == first.shape:
                stride = first.stride if len(pieces) == 1 else local.stride()
                found[key] = distributed_like(param, whole.as_strided(local.shape, stride))
            else:
                found[key] = whole.as_strided(first.shape, first.stride)
        return found

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (param for param in self._pieces if self._has(param))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __setitem__(self, param: torch.Tensor, state: Any) -> None:
        raise TypeError("states on a drive are set by load_state_dict")

    def __delitem__(self, param: torch.Tensor) -> None:
        raise TypeError("states on a drive are set by load_state_dict")

    def verify(self) -> None:
        """Read all blocks on the drive to verify their checksums, since mapping does not. Blocks. Raises CorruptTensor."""
        sub_groups = dict.fromkeys(sub_group for pieces in self._pieces.values() for sub_group, _ in pieces)
        for sub_group in sub_groups:
            if sub_group.layout is not None and sub_group.resident is None:
                self._store.get(block_name(sub_group)).result()

    def _has(self, param: torch.Tensor) -> bool:
        """Return whether the parameter was stepped.

        A master weight alone does not count: a plain torch optimizer that loads it would take it for the parameter's state.
        """
        sub_group, index = self._pieces[param][0]
        return bool(sub_group.small[index]) or any(section.key != MASTER for section in sub_group.sections(index))
