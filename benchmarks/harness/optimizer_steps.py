"""Optimizers and the drive itself as contenders: each step of each in its turn, in a process of its own."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import deepnvme
from deepnvme import AioConfig
from deepnvme.tools.tune.folder import drop_pages, settle
from deepnvme.tools.tune.job import OPERATIONS, Job, Operation, Place
from deepnvme.tools.tune.measuring import CallWorkers, workers
from harness.comparison import Counts
from harness.worker_process import WorkerProcess

Library = Literal["deepspeed", "deepnvme"]

STATE_BYTES = 12
"""Of an element: its master weight in float32 and AdamW's two averages."""
PLAIN_STATE_BYTES = 8
"""Of an element without a master weight."""
QUEUE_DEPTH = 128
"""Our engine's default. With DeepSpeed's, 8, its op is slower."""
_DS_IO = AioConfig(queue_depth=32)
"""What ds_io measures with by default."""


@dataclass(frozen=True)
class Model:
    """``layers`` matrices of ``width`` x ``width``: in bfloat16 with masters in float32, or in float32 without."""

    width: int
    layers: int
    masters: bool = True

    @property
    def elements(self) -> int:
        return self.width * self.width * self.layers

    @property
    def state_bytes(self) -> int:
        return self.elements * (STATE_BYTES if self.masters else PLAIN_STATE_BYTES)


def stepper(process: WorkerProcess, directory: Path) -> Callable[[], Counts]:
    """A contender that steps once. It starts from a quiet drive, with nothing of ``directory`` in the page cache."""

    def step() -> Counts:
        prepared = process.call("prepare")
        quieten(directory)
        return {**prepared, **process.call("step")}

    return step


def quieten(directory: Path) -> None:
    """Drop what the page cache has of a directory, and wait until the drive is idle."""
    drop_pages(path for path in directory.rglob("*") if path.is_file())
    settle(directory)


def start_optimizer(directory: Path, model: Model, sub_group: int, memory_budget: int = 0, peak: bool = False) -> WorkerProcess:
    """``sub_group``: elements; 0 for the optimizer in memory."""
    directory.mkdir()
    settings = {**vars(model), "sub_group": sub_group, "memory_budget": memory_budget, "directory": str(directory), "peak": peak}
    return WorkerProcess(sys.executable, "harness.optimizer_worker", [json.dumps(settings)], directory)


def start_deepspeed(
    python: str,
    directory: Path,
    model: Model,
    sub_group: int,
    buffers: int,
    pipelined: bool,
    op: Library = "deepspeed",
    classes: Library = "deepspeed",
    queue_depth: int | None = QUEUE_DEPTH,
    variables: Mapping[str, str] | None = None,
) -> WorkerProcess:
    """``queue_depth``: of the op; None for no ``aio`` block. ``variables``: of its environment."""
    directory.mkdir()
    settings = {
        "width": model.width,
        "layers": model.layers,
        "sub_group": sub_group,
        "buffers": buffers,
        "pipelined": pipelined,
        "directory": str(directory),
        "op": op,
        "classes": classes,
        "queue_depth": queue_depth,
        "package_at": str(Path(deepnvme.__file__).resolve().parent.parent),
    }
    return WorkerProcess(python, "harness.deepspeed_worker", [json.dumps(settings)], directory, variables)


@contextlib.contextmanager
def drive_limits(
    directory: Path, nbytes: int, rounds: int, operations: Sequence[Operation] = OPERATIONS
) -> Iterator[Callable[[], Counts]]:
    """A contender that says what the drive reads and overwrites in a second, as ds_io measures it."""
    directory.mkdir()
    with contextlib.ExitStack() as stack:
        ds_io: dict[Operation, CallWorkers] = {}
        for operation in operations:
            job = Job((Place(directory, 0),), operation, nbytes, _DS_IO, loops=rounds)
            ds_io[operation] = stack.enter_context(workers(job, [directory]))
            if operation == "read":
                ds_io[operation]("lay_out")
            ds_io[operation]("loop", 0)  # allocates the file, and touches the tensor

        def measure() -> Counts:
            sample: Counts = {"seconds": 0.0}
            for operation in operations:
                quieten(directory)
                ds_io[operation]("prepare", 1)
                ((_, loop),) = ds_io[operation]("loop", 1)
                sample[operation] = loop.nbytes / loop.seconds
                sample["seconds"] += loop.seconds
            return sample

        yield measure
