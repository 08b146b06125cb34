"""What the processes that share parameters do together."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .partition import local_of

if TYPE_CHECKING:
    import torch
    from torch.distributed.tensor import DTensor


class ParamRanks:
    """Of the meshes that DTensors among ``params`` are spread over. Without any, this process is alone."""

    def __init__(self, params: Iterable[torch.Tensor]) -> None:
        self._meshes = {param.device_mesh: local_of(param).device for param in map(_distributed, params) if param is not None}

    def failed(self, here: bool) -> int | None:
        """The rank that says that it failed, ``here`` this one; of several the last. All have to ask, and wait for each other;
        RuntimeError if one is gone."""
        import torch
        import torch.distributed as dist

        failed = -1
        if here:
            failed = dist.get_rank() if self._meshes else 0
        for mesh, device in self._meshes.items():
            if mesh.get_coordinate() is None:
                continue  # of other ranks
            answer = torch.tensor(failed, dtype=torch.int32, device=device)
            for dimension in range(mesh.ndim):
                group = mesh.get_group(dimension)
                if group.size() > 1:
                    dist.all_reduce(answer, dist.ReduceOp.MAX, group=group)
            failed = int(answer.item())
        return None if failed < 0 else failed


class StepVote:
    """On one step. Each rank casts its vote once, however it fares, so that none waits in vain."""

    def __init__(self, ranks: ParamRanks) -> None:
        self._ranks = ranks
        self._cast = False

    def carry(self) -> None:
        """This rank could make the step. Raises RuntimeError if another could not."""
        self._cast = True
        failed = self._ranks.failed(here=False)
        if failed is not None:
            raise RuntimeError(f"rank {failed} failed in this step, and says why: no rank makes it")

    def object(self) -> None:
        """It could not. Has no effect when it has voted before."""
        if not self._cast:
            self._cast = True
            with contextlib.suppress(RuntimeError):  # a rank is gone, which is not worse
                self._ranks.failed(here=True)


def over_ranks(
    params: Sequence[torch.Tensor], norms: Sequence[torch.Tensor | None], norm_type: float
) -> list[torch.Tensor | None]:
    """The norms of gradients, of which DTensors have a shard here, over all ranks: one collective for each group of these.

    All ranks take part with all parameters in the same order; one that has no gradient has the norm 0.
    """
    import torch
    import torch.distributed as dist

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
        powers = (powers if largest else powers**norm_type).to(device)  # where its ranks can meet
        for group in groups:
            dist.all_reduce(powers, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group=group)
        whole = (powers if largest else powers ** (1 / norm_type)).cpu()
        for index, norm in zip(members, whole.unbind(), strict=True):
            before = norms[index]
            found[index] = norm.to(params[index].dtype if before is None else before.dtype)
    return found


def own_directories(
    nvme_path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | Mapping[str, float],
) -> dict[str | os.PathLike[str], float]:
    """The directories with their weights, or each rank's own in them."""
    import torch.distributed as dist

    many = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    own = f"rank{dist.get_rank()}" if many else ""
    if isinstance(nvme_path, (str, os.PathLike)):
        nvme_path = [nvme_path]
    weights = nvme_path if isinstance(nvme_path, Mapping) else dict.fromkeys(nvme_path, 1.0)
    return {Path(path) / own: weight for path, weight in weights.items()}


def _distributed(param: torch.Tensor) -> DTensor | None:
    """Itself, if it is spread over ranks."""
    import torch.distributed as dist

    if local_of(param) is param or not dist.is_available():
        return None
    return param  # type: ignore[return-value]
