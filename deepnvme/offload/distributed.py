"""Collectives among the ranks that share DTensor parameters: whether all can make a step, and norms over all shards."""

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
    """The ranks that share the DTensors among ``params``; without DTensors, only this process."""

    def __init__(self, params: Iterable[torch.Tensor]) -> None:
        self._meshes = {param.device_mesh: local_of(param).device for param in map(_distributed, params) if param is not None}

    def failed(self, here: bool) -> int | None:
        """Return the highest rank that failed, or None if none did.

        A collective: all ranks that share DTensors have to call it. Blocks until they have.

        Args:
            here: Whether this rank failed.

        Raises:
            RuntimeError: If a rank is gone.
        """
        import torch
        import torch.distributed as dist

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


class StepVote:
    """One rank's vote on whether a step is made. No rank makes a step unless all can.

    Each rank votes exactly once for each step, whether it succeeds or fails, so that no rank waits for a vote that never comes.
    """

    def __init__(self, ranks: ParamRanks) -> None:
        self._ranks = ranks
        self._cast = False

    def carry(self) -> None:
        """Vote for the step. Blocks until all ranks have voted. Raises RuntimeError if another rank could not make it."""
        self._cast = True
        failed = self._ranks.failed(here=False)
        if failed is not None:
            raise RuntimeError(f"rank {failed} failed in this step, and says why: no rank makes it")

    def object(self) -> None:
        """Vote against the step. Blocks until all ranks have voted. Has no effect if this rank has voted before."""
        if not self._cast:
            self._cast = True
            with contextlib.suppress(RuntimeError):  # a rank is gone: no rank makes the step in that case either
                self._ranks.failed(here=True)


def over_ranks(
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
        powers = (powers if largest else powers**norm_type).to(device)  # the device that the process group communicates on
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
    """Return the directories to use, with their weights: with several ranks, a subdirectory ``rank<N>`` for each.

    Args:
        nvme_path: One directory, several of equal weight, or a weight for each directory.
    """
    import torch.distributed as dist

    many = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    own = f"rank{dist.get_rank()}" if many else ""
    if isinstance(nvme_path, (str, os.PathLike)):
        nvme_path = [nvme_path]
    weights = nvme_path if isinstance(nvme_path, Mapping) else dict.fromkeys(nvme_path, 1.0)
    return {Path(path) / own: weight for path, weight in weights.items()}


def _distributed(param: torch.Tensor) -> DTensor | None:
    """Return the parameter if it is a DTensor, else None."""
    import torch.distributed as dist

    if local_of(param) is param or not dist.is_available():
        return None
    return param  # type: ignore[return-value]
