"""Partition an optimizer's parameters into sub-groups, the units that are read, stepped and written at once."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from deepnvme.memory.alignment import PAGE, padded

from .params import ParamSlice, local_of
from .sub_group import SubGroup, options_of, step_without_global_hooks

CUT = 4096
"""Parameters are cut only at multiples of this number of elements.

Each cut then lies on a page boundary, in any dtype, so that the states of all pieces can be mapped as one tensor. Cuts also
never split a SIMD vector of the CPU kernels, so that pieces round exactly like the whole tensor.
"""

ELEMENTWISE = frozenset(
    getattr(torch.optim, name)
    for name in ["Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"]
)
"""torch optimizers that work element by element: for them, stepping a part of a parameter gives the same result."""

LOW_PRECISION = (torch.bfloat16, torch.float16)
MASTERABLE_DTYPES = (*LOW_PRECISION, torch.float32)
"""Dtypes that may have float32 master weights: float32 holds their values without loss."""


class SubGroupPlanner:
    """Divides parameters into sub-groups, and estimates the size of their blocks.

    Args:
        optimizer_class: The torch optimizer class to wrap.
        options: Keyword arguments of ``optimizer_class``.
        master_weights: Whether to keep float32 master weights.
        size: Most elements of a sub-group. Only a larger parameter that cannot be cut makes a larger sub-group.
    """

    def __init__(self, optimizer_class: type[Optimizer], options: dict[str, Any], master_weights: bool, size: int) -> None:
        self._class = optimizer_class
        self._make: Callable[[list[Any]], Optimizer] = functools.partial(optimizer_class, **options)
        self._master_weights, self._size = master_weights, size
        self._states_per_element: list[float] = []
        """For each parameter group, the estimated number of state elements for each parameter element."""

    @property
    def optimizer_class(self) -> type[Optimizer]:
        """The torch optimizer class that is wrapped."""
        return self._class

    def defaults(self) -> dict[str, Any]:
        """Return the optimizer's ``defaults``, including the given ``options``.

        They are read from an optimizer for a parameter of one element, since some classes allocate states when constructed.
        """
        return dict(self._make([torch.nn.Parameter(torch.zeros(1, 1, device="cpu"))]).defaults)

    def sub_groups_of(self, groups: Sequence[dict[str, Any]], first_group: int, first: int) -> list[SubGroup]:
        """Check the parameters of these groups and divide them into sub-groups.

        Args:
            groups: Parameter groups.
            first_group: Index in the optimizer's ``param_groups`` of the first of ``groups``.
            first: Number to give to the first sub-group.

        Raises:
            ValueError: For parameters that cannot be offloaded.
            Exception: Whatever the optimizer class raises for parameters or options that it does not accept.
        """
        for group in groups:
            for param, times in Counter(group["params"]).items():
                if times > 1:
                    raise ValueError(f"a parameter of the shape {tuple(param.shape)} is {times} times in its group: list it once")
        self._check_on_stand_ins(groups)
        for group in groups:
            for param in group["params"]:
                self._check(param)
        del self._states_per_element[first_group:]
        self._states_per_element += [self._estimated_states_an_element(group) for group in groups]
        cut = partition(groups, self._size, self._may_be_cut, first_group)
        found = []
        for number, pieces in enumerate(cut, first):
            masters = [self._is_mastered(piece.param) for piece in pieces]
            found.append(SubGroup(number, pieces, masters, self._make))
        return found

    def estimate(self, sub_group: SubGroup) -> int:
        """Return an upper estimate of the bytes of a sub-group's block, for use before its first step."""
        nbytes = 0
        for piece, master in zip(sub_group.pieces, sub_group.masters, strict=True):
            tensors = self._states_per_element[piece.group] + master
            nbytes += int(tensors * (piece.numel * (4 if master else piece.param.element_size()) + PAGE))
        return padded(nbytes, PAGE)

    def block_bytes(self, sub_group: SubGroup) -> int:
        """Return the bytes of a sub-group's block; an estimate before its first step."""
        return self.estimate(sub_group) if sub_group.layout is None else sub_group.layout.nbytes

    def _check_on_stand_ins(self, groups: Sequence[dict[str, Any]]) -> None:
        """Construct the optimizer class on stand-ins for the parameters, so that it rejects unfit ones before the first step.

        Stand-ins take no memory. They are on the meta device or, for a class that does not accept that, are one expanded
        element on the CPU.
        """

        try:
            self._make_with(groups, lambda local, dtype: torch.empty_like(local, dtype=dtype, device="meta"))
        except Exception:
            self._make_with(groups, _of_one_element)

    def _make_with(self, groups: Sequence[dict[str, Any]], stand_in: Callable[[torch.Tensor, torch.dtype], torch.Tensor]) -> None:
        params = dict.fromkeys(param for group in groups for param in group["params"])
        stand_ins = {}
        for param in params:
            dtype = torch.float32 if self._is_mastered(param) else param.dtype
            made = stand_in(local_of(param).detach(), dtype)
            stand_ins[param] = torch.nn.Parameter(made, requires_grad=param.requires_grad)
        self._make([{**options_of(group), "params": [stand_ins[each] for each in group["params"]]} for group in groups])

    def _check(self, param: torch.Tensor) -> None:
        if param.layout != torch.strided:
            raise ValueError(f"a parameter of layout {param.layout} cannot be offloaded: convert it to a dense one")
        if param.device.type == "cpu":
            return
        if not self._master_weights:
            raise ValueError(f"a parameter on {param.device} needs master_weights=True: states are stepped on the CPU")
        if param.dtype not in MASTERABLE_DTYPES:
            raise ValueError(
                f"a parameter of {param.dtype} on {param.device} cannot have float32 master weights without loss: move it to the"
                " CPU, or convert it to float32"
            )

    def _is_mastered(self, param: torch.Tensor) -> bool:
        return self._master_weights and (param.dtype in LOW_PRECISION or param.device.type != "cpu")

    def _may_be_cut(self, param: torch.Tensor) -> bool:
        # In lower precision the kernels' rounding depends on where a SIMD vector ends, so a cut would change results.
        exact = param.dtype in (torch.float32, torch.float64) or self._master_weights
        return self._class in ELEMENTWISE and exact and local_of(param).is_contiguous()

    def states_kept(self, group: Mapping[str, Any], dimensions: int) -> dict[str, bool]:
        """Step a small trial parameter to learn which states the class keeps.

        Args:
            group: The options.
            dimensions: Number of dimensions of the trial parameter.

        Returns:
            For each state's key, whether the state has the parameter's shape, which is not known without dimensions. Empty for a
            class that cannot step such a parameter.
        """
        try:
            optimizer, trial = self._stepped(group, (2,) * dimensions)
        except Exception:
            return {}
        alike = {key: getattr(value, "shape", None) == trial.shape for key, value in optimizer.state[trial].items()}
        return {key: dimensions > 0 and each for key, each in alike.items()}

    def _stepped(self, group: Mapping[str, Any], shape: Sequence[int]) -> tuple[Optimizer, torch.nn.Parameter]:
        """Return an optimizer with a group's options, and a parameter of zeros that it has stepped with a gradient of zeros."""
        trial = torch.nn.Parameter(torch.zeros(shape, dtype=torch.float32, device="cpu"))
        trial.grad = torch.zeros_like(trial)
        optimizer = self._make([{**options_of(group), "params": [trial]}])
        step_without_global_hooks(optimizer)
        return optimizer, trial

    def _estimated_states_an_element(self, group: dict[str, Any]) -> float:
        """Estimate state elements per parameter element by stepping a small trial parameter; 2, as for Adam, if that fails."""
        dimensions = max((param.dim() for param in group["params"]), default=1)
        try:
            optimizer, trial = self._stepped(group, (32,) * max(1, min(dimensions, 3)))
            kept = [value.numel() for value in optimizer.state[trial].values() if isinstance(value, torch.Tensor)]
            return sum(numel for numel in kept if numel > 1) / trial.numel()
        except Exception:
            return 2.0


def partition(
    param_groups: Sequence[dict[str, Any]], size: int, may_be_cut: Callable[[torch.Tensor], bool], first_group: int = 0
) -> list[list[ParamSlice]]:
    """Divide parameters into sub-groups, in the order of the parameters.

    Args:
        param_groups: Parameter groups of a torch optimizer.
        size: Most elements of a sub-group, rounded down to a multiple of CUT, but at least CUT. A larger parameter that may not
            be cut makes a larger sub-group.
        may_be_cut: Returns whether a parameter may be cut.
        first_group: Index in the optimizer's ``param_groups`` of the first of ``param_groups``.

    Returns:
        For each sub-group, its slices.
    """
    size = max(CUT, size // CUT * CUT)
    found: list[list[ParamSlice]] = []
    filled = size
    for group, options in enumerate(param_groups, first_group):
        for param in options["params"]:
            numel = local_of(param).numel()
            begin = 0
            while begin < numel or begin == 0:
                room = size - filled
                rest = numel - begin
                if rest > room:
                    room = room // CUT * CUT
                    # Start a new sub-group rather than fill this one's small rest: fewer, larger pieces.
                    if not may_be_cut(param) or room < max(1, min(rest, size) // 4):
                        found.append([])
                        filled = 0
                        room = size if may_be_cut(param) else rest
                if not found:
                    found.append([])
                end = begin + min(rest, room)
                found[-1].append(ParamSlice(param, group, begin, end, whole=end - begin == numel))
                filled += end - begin
                begin = end
                if numel == 0:
                    break
    return found


def _of_one_element(local: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a CPU tensor with the shape of ``local``. A strided one takes the memory of a single element."""
    if local.layout != torch.strided:
        return torch.empty_like(local, dtype=dtype, device="cpu")
    return torch.zeros(1, dtype=dtype, device="cpu").expand(local.shape)
