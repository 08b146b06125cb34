"""How the parameters of an optimizer are cut into sub-groups, the units that are read, stepped and written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

CUT = 4096
"""Elements: parameters are cut at multiples of this. Every element's bytes then begin a page in whatever dtype, so that cut
states can be mapped as one; and vectors of the kernels are not cut, so that they round like those of the whole tensor."""


@dataclass(frozen=True, eq=False)
class ParamSlice:
    """A parameter, or a run of its elements."""

    param: torch.Tensor
    group: int
    """Of ``param_groups``."""
    begin: int
    end: int
    whole: bool
    times: int = 1
    """How often the parameter is in its group: that often it is stepped in a step, as torch does it."""

    @property
    def numel(self) -> int:
        """Elements."""
        return self.end - self.begin

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """This piece of a tensor that is shaped like the parameter: a view. What is held here, of a DTensor."""
        tensor = local_of(tensor).detach()
        return tensor if self.whole else tensor.view(-1)[self.begin : self.end]

    @property
    def gradient(self) -> torch.Tensor | None:
        """This piece of the parameter's."""
        gradient = self.param.grad
        if gradient is None or self.whole:
            return None if gradient is None else self.of(gradient)
        self.check_gradient()
        local = local_of(gradient)
        return self.of(local if local.is_contiguous() else local.contiguous())

    def check_gradient(self) -> None:
        """Raise TypeError for one that has no such piece."""
        import torch

        gradient = self.param.grad
        if gradient is not None and not self.whole and gradient.layout is not torch.strided:
            raise TypeError(
                f"a gradient of layout {gradient.layout} cannot be cut like its parameter, of shape {tuple(self.param.shape)}:"
                f" set sub_group_size to {self.param.numel()} or more"
            )


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or a DTensor's shard that this process holds."""
    import torch

    if not hasattr(tensor, "to_local"):
        return tensor
    with torch.no_grad():
        shard: torch.Tensor = tensor.to_local()
    return shard


def distributed_like(tensor: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """``local`` as the shard of a tensor distributed like this one, if that is."""
    if local_of(tensor) is tensor:
        return local
    from torch.distributed.tensor import DTensor

    assert isinstance(tensor, DTensor)
    return DTensor.from_local(
        local, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.size(), stride=tensor.stride()
    )


def partition(
    param_groups: Sequence[dict[str, Any]], size: int, may_be_cut: Callable[[torch.Tensor], bool], first_group: int = 0
) -> list[list[ParamSlice]]:
    """Sub-groups of at most ``size`` elements (a multiple of CUT; rounded down, but to no less than one), in the order of the
    parameters; larger where one that may not be cut is larger."""
    size = max(CUT, size // CUT * CUT)
    found: list[list[ParamSlice]] = []
    filled = size
    for group, options in enumerate(param_groups, first_group):
        for param, times in Counter(options["params"]).items():
            numel = local_of(param).numel()
            begin = 0
            while begin < numel or begin == 0:
                room = size - filled
                rest = numel - begin
                if rest > room:
                    room = room // CUT * CUT
                    if not may_be_cut(param) or room < max(1, min(rest, size) // 4):  # rather than many small pieces
                        found.append([])
                        filled = 0
                        room = size if may_be_cut(param) else rest
                if not found:
                    found.append([])
                end = begin + min(rest, room)
                found[-1].append(ParamSlice(param, group, begin, end, whole=end - begin == numel, times=times))
                filled += end - begin
                begin = end
                if numel == 0:
                    break
    return found
