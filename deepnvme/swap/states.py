"""The states of an optimizer in the form that torch gives them: mapped from the drive, and taken over from others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from .block import PAGE
from .store import TensorStore
from .sub_group import MASTER, Held, SubGroup
from .sub_groups import local_of
from .sweep import block_name


class States(MutableMapping[Any, Any]):
    """``optimizer.state``: parameter -> its state. Tensors are mapped from the drive when they are asked for, and valid until
    the next step; changing them changes nothing on the drive."""

    def __init__(self, pieces: Mapping[torch.Tensor, Sequence[tuple[SubGroup, int]]], store: TensorStore) -> None:
        self._pieces, self._store = pieces, store

    def __getitem__(self, param: torch.Tensor) -> dict[str, Any]:
        pieces = self._pieces[param]
        if not self._has(param):
            raise KeyError(param)
        local = local_of(param)
        found: dict[str, Any] = {
            key: _like(param, value) if isinstance(value, torch.Tensor) and value.shape == local.shape else value
            for key, value in pieces[0][0].small[pieces[0][1]].items()
        }
        keys = [section.key for section in pieces[0][0].sections(pieces[0][1])]
        for sub_group, _ in pieces:
            spill(sub_group, self._store)
        for number, key in enumerate(keys):
            sections = [(sub_group, list(sub_group.sections(index))[number]) for sub_group, index in pieces]
            first = sections[0][1]
            inside = first.offset % PAGE
            mapped = self._store.map_ranges(
                [(block_name(each), section.offset - inside, section.nbytes + inside) for each, section in sections]
            )
            whole = mapped[inside:].view(first.dtype)
            if len(pieces) > 1 or tuple(local.shape) == first.shape:
                found[key] = _like(param, whole.as_strided(local.shape, first.stride if len(pieces) == 1 else local.stride()))
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
        """Read all that lies on the drive, of which mapping verifies nothing. Raises CorruptTensor."""
        sub_groups = dict.fromkeys(sub_group for pieces in self._pieces.values() for sub_group, _ in pieces)
        for sub_group in sub_groups:
            if sub_group.layout is not None and sub_group.resident is None:
                self._store.get(block_name(sub_group)).result()

    def _has(self, param: torch.Tensor) -> bool:
        """Whether it was stepped: a master weight alone is as good as none, and optimizers in memory take it for a state."""
        sub_group, index = self._pieces[param][0]
        return bool(sub_group.small[index]) or any(section.key != MASTER for section in sub_group.sections(index))


def spill(sub_group: SubGroup, store: TensorStore) -> None:
    """Have a copy on the drive of what is in memory only, to be mapped: one in memory would double it."""
    if sub_group.resident is not None and not sub_group.spilled and sub_group.layout is not None:
        sub_group.current = 0
        store.put(block_name(sub_group), sub_group.resident.buffer[: sub_group.layout.nbytes]).result()
        sub_group.spilled = True


class Opaque:
    """A tensor that torch's load_state_dict shall not cast: that would copy it, and round master weights."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


def opaque(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """A hook before load_state_dict that makes its tensors such."""
    states = {
        param: {key: Opaque(value) if isinstance(value, torch.Tensor) else value for key, value in state.items()}
        for param, state in state_dict["state"].items()
    }
    return {**state_dict, "state": states}


def take_over(
    sub_group: SubGroup, saved: Mapping[torch.Tensor, Mapping[str, Any]], groups: Sequence[dict[str, Any]]
) -> Held:
    """What the sub-group's block has to hold for these states of whole parameters; what is small is the sub-group's at once.

    Cast like torch's load_state_dict does: to the parameter's dtype, or to float32 beside master weights.
    """
    held: Held = []
    for index, piece in enumerate(sub_group.pieces):
        values = {
            key: value.value if isinstance(value, Opaque) else value for key, value in saved.get(piece.param, {}).items()
        }
        master = values.pop(MASTER, None)
        dtype = torch.float32 if sub_group.masters[index] else piece.param.dtype
        if sub_group.masters[index]:
            held.append((index, MASTER, piece.of(piece.param if master is None else master).to("cpu", dtype)))
        small: dict[str, Any] = {}
        for key, value in values.items():
            if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
                small[key] = value
                continue
            if key == "step":
                fused = groups[piece.group].get("fused") or groups[piece.group].get("capturable")
                value = value.to(torch.float32) if fused else value
            elif piece.param.is_floating_point():
                value = value.to(dtype)
            if value.numel() <= 1:
                small[key] = local_of(value).detach().to("cpu", copy=True)
            else:
                held.append((index, key, (local_of(value) if piece.whole else piece.of(value)).to("cpu")))
        sub_group.small[index] = small
    return held


def _like(param: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """``local`` as the shard of a tensor distributed like ``param``, if that is."""
    if local_of(param) is param:
        return local
    from torch.distributed.tensor import DTensor

    assert isinstance(param, DTensor)
    return DTensor.from_local(
        local, param.device_mesh, param.placements, run_check=False, shape=param.size(), stride=param.stride()
    )
