"""One of several processes that save one checkpoint together:
``python -m harness.parallel_worker SETTINGS REQUESTS REPLIES``."""

from __future__ import annotations

import functools
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import deepnvme
from harness import checkpoints
from harness.serving import serve


class ParallelWorker:
    """One rank of a group that saves a state together."""

    def __init__(self, *, rank: int, ranks: int, width: int, layers: int, vocabulary: int, directory: str) -> None:
        self._rank, self._ranks = rank, ranks
        self._directory = Path(directory)
        self._state = checkpoints.transformer(width, layers, vocabulary)

    def describe(self) -> dict[str, Any]:
        return {"torch": torch.__version__, "bytes": checkpoints.nbytes_of(self._state)}

    def save(self, *, how: str, path: str) -> dict[str, float]:
        """``how``: "one" process, those "together" that have the same state, or a "sharded" one. Each is as long at it as all."""
        self._join()
        state: dict[str, Any] = self._sharded if how == "sharded" else self._state
        dist.barrier()
        begun = time.perf_counter()
        if how != "one":
            deepnvme.save(state, path, group=dist.group.WORLD)
        elif self._rank == 0:
            deepnvme.save(state, path)
        dist.barrier()
        return {"seconds": time.perf_counter() - begun}

    @functools.cache  # noqa: B019
    def _join(self) -> None:
        """Enter the process group."""
        meeting = f"file://{self._directory / 'meeting'}"
        dist.init_process_group("gloo", init_method=meeting, rank=self._rank, world_size=self._ranks)

    @functools.cached_property
    def _sharded(self) -> dict[str, Any]:
        """The state as DTensors, a part of each on every rank."""
        mesh = init_device_mesh("cpu", (self._ranks,))
        return {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in self._state.items()}


def main() -> None:
    settings, request_fd, reply_fd = sys.argv[1:]
    serve(lambda: ParallelWorker(**json.loads(settings)), ("save",), int(request_fd), int(reply_fd))


if __name__ == "__main__":
    main()
