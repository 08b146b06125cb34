"""This rank's part of parameters: shards of DTensors, slices for sub-groups, and collectives over the ranks that share them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


@dataclass(frozen=True, eq=False)
class ParamSlice:
    """A piece of a sub-group: a parameter (of a DTensor, this rank's shard), or a contiguous range of its elements."""

    param: torch.Tensor
    group: int
    """Index of the parameter's group in ``param_groups``."""
    begin: int
    """First element, in the flattened parameter."""
    end: int
    """One past the last element, in the flattened parameter."""
    whole: bool
    """Whether the slice is the whole parameter (or shard)."""

    @property
    def numel(self) -> int:
        """Number of elements in the slice."""
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
        return self.of(local_of(gradient).contiguous())

    def check_gradient(self) -> None:
        """Raise TypeError if the gradient is not strided (sparse, for example) and would have to be cut."""

        gradient = self.param.grad
        if gradient is not None and not self.whole and gradient.layout is not torch.strided:
            raise TypeError(
                f"a gradient of layout {gradient.layout} cannot be cut like its parameter, of shape {tuple(self.param.shape)}:"
                f" set sub_group_size to {self.param.numel()} or more"
            )


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor itself, or this rank's shard of a DTensor."""

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


def param_version(param: torch.Tensor) -> tuple[int, int]:
    """Return a value that differs after each in-place change of the parameter, and after its memory was replaced."""
    local = local_of(param)
    return local._version, local.data_ptr()


class ParamRanks:
    """The ranks that share the DTensors among ``params``; without DTensors, only this process."""

    def __init__(self, params: Iterable[torch.Tensor]) -> None:
        self._meshes = {param.device_mesh: local_of(param).device for param in map(_distributed, params) if param is not None}

    @property
    def several(self) -> bool:
        """Whether any parameter is a DTensor, so that several ranks make each step together."""
        return bool(self._meshes)

    def failed(self, here: bool) -> int | None:
        """Return the number of the highest rank that failed, or None if none did.

        A collective: all ranks that share DTensors have to call it. Blocks until they have.

        Args:
            here: Whether this rank failed.

        Raises:
            RuntimeError: If a rank's process has ended.
        """

        failed = -1
        if here:
            failed = dist.get_rank() if self._meshes else 0
        for mesh, device in self._meshes.items():
            if mesh.get_coordinate() is None:
                continue  # this rank is not in the mesh
            answer = torch.tensor(failed, dtype=torch.int32, device=device)
            for dimension in range(mesh.ndim):
                group = mesh.get_group(dimension)
                if group.size() > 1:
                    dist.all_reduce(answer, dist.ReduceOp.MAX, group=group)
            failed = int(answer.item())
        return None if failed < 0 else failed


def combine_shard_norms(
    params: Sequence[torch.Tensor], norms: Sequence[torch.Tensor | None], norm_type: float
) -> list[torch.Tensor | None]:
    """Combine the norms of this rank's gradient shards into norms of the whole gradients.

    A collective: all ranks call it, with all parameters in the same order. There is one all-reduce for each set of process
    groups that parameters are sharded over.

    Args:
        params: Parameters; those that are not sharded DTensors keep their norm.
        norms: For each parameter, the norm of this rank's shard of its gradient. None without a gradient, which counts as 0.
        norm_type: The order of the norm; may be ``inf``.

    Returns:
        For each parameter, the norm of its whole gradient, on the CPU if it is sharded.
    """

    found = list(norms)
    together: dict[tuple[torch.device, tuple[dist.ProcessGroup, ...]], list[int]] = {}
    for index, param in enumerate(map(_distributed, params)):
        if param is not None:
            mesh = param.device_mesh
            groups = tuple(mesh.get_group(at) for at, placement in enumerate(param.placements) if placement.is_shard())
            if groups:
                together.setdefault((local_of(param).device, groups), []).append(index)
    largest = math.isinf(norm_type)
    for (device, groups), members in together.items():
        here = (norms[index] for index in members)
        zero = torch.zeros((), dtype=torch.float64, device="cpu")
        powers = torch.stack([zero if norm is None else norm.double() for norm in here])
        powers = (powers if largest else powers**norm_type).to(device)  # the device that the process group communicates on
        for group in groups:
            dist.all_reduce(powers, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group=group)
        whole = (powers if largest else powers ** (1 / norm_type)).cpu()
        for index, norm in zip(members, whole.unbind(), strict=True):
            before = norms[index]
            found[index] = norm.to(params[index].dtype if before is None else before.dtype)
    return found


def _distributed(param: torch.Tensor) -> DTensor | None:
    """Return the parameter if it is a DTensor, else None."""

    if local_of(param) is param or not dist.is_available():
        return None
    return param  # type: ignore[return-value]
