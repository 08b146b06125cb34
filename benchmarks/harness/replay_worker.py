"""A process with replay buffers of torchrl on a drive: ``python -m harness.replay_worker REQUESTS REPLIES``."""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # those of packages that it imports
    from tensordict import TensorDict
    from torchrl.data import LazyMemmapStorage, TensorDictReplayBuffer

from deepnvme.integrations.torchrl import NVMeStorage
from harness.serving import serve

BATCH = 256
SHAPE = (4, 84, 84)
"""Of the frames of a transition, in bytes: 28 KB."""
OURS, MAPPED, RANDOM = "deepnvme", "LazyMemmapStorage", "LazyMemmapStorage with MADV_RANDOM"


class Worker:
    """One buffer for each storage, filled, with the same transitions."""

    def __init__(self) -> None:
        self._buffers: dict[str, Any] = {}
        self._written = 0

    def describe(self) -> dict[str, Any]:
        return {"torch": torch.__version__}

    def fill(self, *, directory: str, count: int) -> dict[str, Any]:
        """Make the buffers, and fill them."""
        path = Path(directory)
        storages = {
            OURS: NVMeStorage(count, path / "ours"),
            MAPPED: LazyMemmapStorage(count, scratch_dir=str(path / "mapped")),
        }
        for name, storage in storages.items():
            self._buffers[name] = TensorDictReplayBuffer(storage=storage, batch_size=BATCH)
            for first in range(0, count, BATCH):
                self._buffers[name].extend(_transitions(first, min(BATCH, count - first)))
            os.sync()
        return {}

    def run(self, *, what: str, contender: str, seconds: float) -> dict[str, Any]:
        """Sample or extend for some time."""
        buffer = self._buffers[OURS if contender == OURS else MAPPED]
        if contender != OURS:
            _advise(buffer._storage._storage["frames"], mmap.MADV_RANDOM if contender == RANDOM else mmap.MADV_NORMAL)
        batch = _transitions(0, BATCH)
        count, cpu, begun = 0, _cpu_seconds(), time.perf_counter()
        while count == 0 or time.perf_counter() - begun < seconds:
            if what == "extend":
                buffer.extend(batch)
            else:
                found = buffer.sample()
                if not torch.equal(found["frames"][:, 0, 0, 0], (found["number"] % 251).to(torch.uint8)):
                    raise ValueError("a sample has the frames of another")
            count += BATCH
        taken = time.perf_counter() - begun
        return {"rate": count / taken, "seconds": taken, "samples": count, "cpu_seconds": _cpu_seconds() - cpu}


def _transitions(first: int, count: int) -> Any:
    numbers = torch.arange(first, first + count)
    frames = (numbers % 251).to(torch.uint8)[:, None, None, None].expand(count, *SHAPE).contiguous()
    return TensorDict({"frames": frames, "number": numbers, "reward": torch.zeros(count)}, [count])


def _advise(tensor: torch.Tensor, advice: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    begin = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    if libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(tensor.data_ptr() + tensor.nbytes - begin), advice):
        raise OSError(ctypes.get_errno(), "madvise")


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    serve(Worker, ("fill", "run"), int(sys.argv[1]), int(sys.argv[2]))
