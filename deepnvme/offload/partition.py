"""Cut an optimizer's parameters into sub-groups, the units that are read, stepped and written at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

CUT = 4096
"""Elements. Parameters are cut only at multiples of this.

Each cut then lies on a page boundary, in any dtype, so that the states of all pieces can be mapped as one tensor. Cuts also never
split a SIMD vector of the CPU kernels, so that pieces round exactly like the whole tensor."""


@dataclass(frozen=True, eq=False)
class ParamSlice:
    """A parameter, or a contiguous range of its elements. For a DTensor, of this rank's shard."""

    param: torch.Tensor
    group: int
    """Index in ``param_groups``."""
    begin: int
    """First element, in the flattened parameter."""
    end: int
    """One past the last element."""
    whole: bool
    """Whether the slice is the whole parameter (or shard)."""
    times: int = 1
    """How often the parameter is listed in its group. It is stepped that often in each step, as torch does."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.end - self.begin

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return this slice of a tensor that has the parameter's shape, as a view; of a DTensor, of this rank's shard."""
        tensor = local_of(tensor).detach()
        return tensor if self.whole else tensor.view(-1)[self.begin : self.end]

    @property
    def gradient(self) -> torch.Tensor | None:
        """This slice of the parameter's gradient; None without a gradient. A view, if the gradient is contiguous or not cut."""
        gradient = self.param.grad
        if gradient is None or self.whole:
            return None if gradient is None else self.of(gradient)
        self.check_gradient()
        local = local_of(gradient)
        return self.of(local if local.is_contiguous() else local.contiguous())

    def check_gradient(self) -> None:
        """Raise TypeError if the gradient is not strided (sparse, for example) and would have to be cut."""
        import torch

        gradient = self.param.grad
        if gradient is not None and not self.whole and gradient.layout is not torch.strided:
            raise TypeError(
                f"a gradient of layout {gradient.layout} cannot be cut like its parameter, of shape {tuple(self.param.shape)}:"
                f" set sub_group_size to {self.param.numel()} or more"
            )


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor itself, or this rank's shard of a DTensor."""
    import torch

    if not hasattr(tensor, "to_local"):
        return tensor
    with torch.no_grad():
        shard: torch.Tensor = tensor.to_local()
    return shard


def distributed_like(tensor: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Return ``local`` as the shard of a DTensor distributed like ``tensor``; ``local`` itself if that is no DTensor."""
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
    """Divide parameters into sub-groups, in the order of the parameters.

    Args:
        param_groups: Parameter groups of a torch optimizer.
        size: Most elements of a sub-group; rounded down to a multiple of CUT, but at least CUT. A parameter that may not be cut
            and is larger gets a larger sub-group.
        may_be_cut: Whether a parameter may be cut.
        first_group: The number of the first of ``param_groups``.

    Returns:
        For each sub-group, its slices.
    """
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
                    # Start a new sub-group rather than fill this one's small rest: fewer, larger pieces.
                    if not may_be_cut(param) or room < max(1, min(rest, size) // 4):
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
