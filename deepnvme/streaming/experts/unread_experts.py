"""Tensors that stand for the weights of experts, and read an expert's part when an operation uses it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import torch
from torch.utils._pytree import tree_map

from deepnvme.model.weight_differences import WeightInfo
from deepnvme.streaming.placeholder import RESTORE, Placeholder

Read = Callable[[int], torch.Tensor]
"""Returns the weight of an expert, by the expert's number. Blocks until it is in memory."""
IsRead = Callable[[int], bool]
"""Returns whether the weight of an expert, by the expert's number, is in memory. Never blocks."""


class UnreadExperts(Placeholder):
    """The weights of all experts of a layer, of shape [experts, ...]; an expert's weight is read when it is used.

    What transformers' implementations of experts do with such a tensor is possible: to select one expert or several by number
    (eager, batched_mm), to transpose the last two dimensions, and to multiply groups of rows by one expert each (grouped_mm).
    Anything else raises RuntimeError.
    """

    read: Read
    """Reads the weight of an expert."""
    is_read: IsRead
    """Returns whether the weight of an expert is in memory."""
    is_transposed: bool
    """Whether the last two dimensions are exchanged."""
    on_demand = True
    """Has functions that list a model's weights leave this one out: see :func:`weights_by_name`."""

    @staticmethod
    def make(
        weight: str, layer: str, info: WeightInfo, device: torch.device, read: Read, is_read: IsRead, transposed: bool = False
    ) -> UnreadExperts:
        """Return such a tensor. ``info``: its dtype and shape; others as for :class:`Placeholder`."""
        made = UnreadExperts(weight, layer, info, device)
        made.read, made.is_read, made.is_transposed = read, is_read, transposed
        return made

    def in_memory_first(self, numbers: Iterable[int]) -> list[int]:
        """Return experts in the order in which they are best computed: others are read while those in memory compute."""
        return sorted(numbers, key=lambda number: (not self.is_read(number % self.shape[0]), number))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        operation = _OPERATIONS.get(str(func))
        if operation is not None:
            with torch.inference_mode(False), torch.no_grad():  # select returns a view, and those count changes
                result = operation(*args, **(kwargs or {}))
            if result is not None:
                return result
        return super().__torch_dispatch__(func, types, args, kwargs)

    def expert(self, number: int) -> torch.Tensor:
        """Return an expert's weight, in this tensor's dtype and on its device. Blocks until it is read.

        A negative number counts from the end. Raises IndexError if there is no such expert.
        """
        experts = self.shape[0]
        if not -experts <= number < experts:
            raise IndexError(f"expert {number} is out of range: {self.weight!r} has {experts} experts")
        weight = self.read(number % experts).to(device=self.device, dtype=self.dtype)
        return weight.transpose(-2, -1) if self.is_transposed else weight

    def data_ptr(self) -> int:  # type: ignore[override]
        """Return an address that is aligned to nothing: with torch 2.10 and older, transformers then takes its own grouped_mm."""
        return 1

    def _refuse(self, what: str) -> NoReturn:
        raise RuntimeError(
            f"{what}: the experts in {self.weight!r} are read when they are chosen, during the forward of {self.block!r}, for"
            f" transformers' experts implementations eager, grouped_mm and batched_mm; for anything else, {RESTORE}"
        )


class UnreadWeight(Placeholder):
    """A weight of one expert, which is read when an operation uses it."""

    read: Callable[[], torch.Tensor]
    """Reads the weight."""
    on_demand = True
    """As for :class:`UnreadExperts`."""

    @staticmethod
    def make(weight: str, expert: str, info: WeightInfo, device: torch.device, read: Callable[[], torch.Tensor]) -> UnreadWeight:
        """Return such a tensor. Arguments as for :class:`Placeholder`."""
        made = UnreadWeight(weight, expert, info, device)
        made.read = read
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.detach.default:
            return super().__torch_dispatch__(func, types, args, kwargs)

        def present(each: Any) -> Any:
            """Return what a weight has on the drive, read; anything else as it is."""
            return each.read().to(device=each.device, dtype=each.dtype) if isinstance(each, UnreadWeight) else each

        args, kwargs = tree_map(present, (args, kwargs or {}))
        return func(*args, **kwargs)


def _select(weight: UnreadExperts, dim: int, index: int) -> torch.Tensor | None:
    """Return the weight of one expert; None for another dimension."""
    return None if dim % weight.dim() else weight.expert(index)


def _index(weight: Any, indices: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    """Return the weights of several experts, stacked: each is read once. None unless the index is one row of numbers."""
    rows = indices[0] if len(indices) == 1 else None
    if not isinstance(weight, UnreadExperts) or rows is None or rows.dim() != 1 or rows.dtype == torch.bool:
        return None
    numbers = rows.tolist()
    stacked = torch.empty((len(numbers), *weight.shape[1:]), dtype=weight.dtype, device=weight.device)
    for expert in weight.in_memory_first(set(numbers)):
        one = weight.expert(expert)
        for place in [place for place, number in enumerate(numbers) if number == expert]:
            stacked[place] = one
    return stacked


def _transpose(weight: UnreadExperts, first: int, second: int) -> UnreadExperts | None:
    """Return the weights with the last two dimensions exchanged. Reads nothing. None for other dimensions."""
    if weight.dim() != 3 or {first % 3, second % 3} != {1, 2}:
        return None
    experts, rows, columns = weight.shape
    info = WeightInfo(weight.dtype, (experts, columns, rows))
    return UnreadExperts.make(
        weight.weight, weight.block, info, weight.device, weight.read, weight.is_read, not weight.is_transposed
    )


def _grouped_mm(
    rows: torch.Tensor,
    weight: Any,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor | None:
    """Return ``rows`` multiplied by the experts' weights: those from ``offs[e - 1]`` up to ``offs[e]`` by that of expert e.

    Rows after the last offset are zeros. Experts without rows are not read.
    """
    if not isinstance(weight, UnreadExperts) or rows.dim() != 2 or offs is None or bias is not None:
        return None
    if out_dtype not in (None, rows.dtype):
        return None
    result = rows.new_zeros((rows.shape[0], weight.shape[2]))
    ends = offs.tolist()
    groups = {expert: (begin, end) for expert, (begin, end) in enumerate(itertools.pairwise([0, *ends])) if begin < end}
    for expert in weight.in_memory_first(groups):
        begin, end = groups[expert]
        torch.mm(rows[begin:end], weight.expert(expert), out=result[begin:end])
    return result


_OPERATIONS: dict[str, Callable[..., torch.Tensor | None]] = {
    "aten.select.int": _select,
    "aten.index.Tensor": _index,
    "aten.transpose.int": _transpose,
    "aten._grouped_mm.default": _grouped_mm,
    "transformers.grouped_mm_fallback.default": _grouped_mm,  # instead of the former where torch has no such kernel
}
"""By the operation of torch that transformers calls: what does the same to experts that are not read yet. None: not possible."""
