"""Present offloaded states as ``optimizer.state``, mapped from the drive, and replace them by loaded ones, all or none."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from deepnvme._interrupts import defer_interrupts

from .counted_io import CountedIO
from .gradients import Pieces
from .params import distributed_like, local_of
from .pipeline import SubGroupPipeline
from .sub_group import MASTER, BlockTensors, SubGroup, copied
from .versions import BlockVersions


class OffloadedStates(MutableMapping[Any, Any]):
    """``optimizer.state`` of an offloaded optimizer: a read-only mapping from parameter to its state.

    Tensors are memory-mapped from the drive when a parameter's state is read. They keep their values when further steps are
    made, and changing them changes nothing on the drive. Parameters that were never stepped are missing.

    Raises TypeError for setting or deleting an item.
    """

    def __init__(
        self,
        pieces: Pieces,
        blocks: BlockVersions,
        check: Callable[[], None],
        write: Callable[[SubGroup], None] | None = None,
    ) -> None:
        """Present the states of ``pieces``.

        Args:
            pieces: Parameter -> (sub-group, index of the piece). The caller may add to it.
            blocks: Maps the blocks, and keeps mapped ones from being overwritten.
            check: Called before states are read; raises if they cannot be read now.
            write: Writes the states of a sub-group that are only in memory, so that they can be mapped. None if there are none.
        """
        self._pieces, self._blocks, self._check, self._write = pieces, blocks, check, write

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
            if self._write is not None:
                self._write(sub_group)
        for number, key in enumerate(keys):
            sections = [(sub_group, list(sub_group.sections(index))[number]) for sub_group, index in pieces]
            first = sections[0][1]
            whole = self._blocks.map(sections)
            if len(pieces) > 1:  # of a contiguous parameter, which may be without memory now, and then has other strides
                found[key] = distributed_like(param, whole[: local.numel()].view(local.shape))
            elif tuple(local.shape) == first.shape:
                found[key] = distributed_like(param, whole.as_strided(local.shape, first.stride))
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
        """Read all blocks back from the drive to verify their checksums, since mapping does not. Blocks. Raises CorruptTensor."""
        sub_groups = dict.fromkeys(sub_group for pieces in self._pieces.values() for sub_group, _ in pieces)
        for sub_group in sub_groups:
            if self._write is not None:
                self._write(sub_group)
            if sub_group.current is not None:
                self._blocks.verify(sub_group)

    def _has(self, param: torch.Tensor) -> bool:
        """Return whether the mapping has an entry for the parameter, which it has once the parameter was stepped.

        A parameter with a master weight and no other state is left out, since a plain torch optimizer that loads it would take
        the master weight for the parameter's state. It is included if no parameter has other states, as with SGD without
        momentum: the master weights would be lost otherwise.
        """
        sub_group, index = self._pieces[param][0]
        if _has_states(sub_group, index):
            return True
        mastered = any(section.key == MASTER for section in sub_group.sections(index))
        return mastered and not any(_has_states(each, at) for pieces in self._pieces.values() for each, at in pieces)


def _has_states(sub_group: SubGroup, index: int) -> bool:
    """Return whether a piece has states beside its master weight."""
    return bool(sub_group.small[index]) or any(section.key != MASTER for section in sub_group.sections(index))


@contextlib.contextmanager
def loaded(state: Mapping[str, Any], sub_groups: Sequence[SubGroup], pipeline: SubGroupPipeline, io: CountedIO) -> Iterator[None]:
    """Write loaded states to the drive, one sub-group at a time, beside the current ones. A context manager.

    The ``with`` body makes the loaded states the current ones; interrupts are deferred during it. On an exception before its
    end, sub-groups are as they were.

    Args:
        state: What torch's ``load_state_dict`` passes to ``__setstate__``: "state" by parameter, and "param_groups".
        sub_groups: The sub-groups to load.
        pipeline: Writes the blocks.
        io: Leaves these writes out of the step's report.
    """
    pipeline.drop_clean()
    undo = [sub_group.snapshot() for sub_group in sub_groups]
    done = False
    try:
        with io.aside():
            for sub_group in sub_groups:
                held = block_tensors_of(sub_group, state["state"], state["param_groups"])
                if held:
                    pipeline.store(sub_group, held)
                else:
                    sub_group.set_current_block(None)
        with defer_interrupts():
            yield
            done = True
            pipeline.clear()
    except BaseException:
        if not done:
            with defer_interrupts():
                for forget in undo:
                    forget()
        raise


class Opaque:
    """Wraps a tensor so that torch's ``load_state_dict`` does not cast it, which would copy it and round master weights."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


def opaque(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return a state dict whose tensors are wrapped in :class:`Opaque`. Used as a ``load_state_dict`` pre-hook."""
    states = {
        param: {key: Opaque(value) if isinstance(value, torch.Tensor) else value for key, value in state.items()}
        for param, state in state_dict["state"].items()
    }
    return {**state_dict, "state": states}


def block_tensors_of(
    sub_group: SubGroup, saved: Mapping[torch.Tensor, Mapping[str, Any]], groups: Sequence[dict[str, Any]]
) -> BlockTensors:
    """Return the tensors of a sub-group's block, cut from loaded states, and set ``small``, the states outside the block.

    Values are cast as by torch's ``load_state_dict``: to the parameter's dtype, or to float32 if it has a master weight.

    Args:
        sub_group: The sub-group. Its ``small`` is replaced, and its layout is dropped.
        saved: For each parameter, its whole state.
        groups: The parameter groups that belong to these states.
    """
    held: BlockTensors = []
    smalls: list[dict[str, Any]] = []
    for index, piece in enumerate(sub_group.pieces):
        values = {key: value.value if isinstance(value, Opaque) else value for key, value in saved.get(piece.param, {}).items()}
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
        smalls.append(small)
    sub_group.replace_small(smalls)
    return held
