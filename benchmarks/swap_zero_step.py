"""The optimizer step of ZeRO stage 3 with states on the drive: DeepSpeed's swapper classes against ours, both on our op.

    python benchmarks/swap_zero_step.py --deepspeed-python ~/deepspeed/bin/python --dir /mnt/nvme --json swap_zero_step.json

Each contender trains in a process of its own; they take turns step by step, so that what disturbs one disturbs the other, and a
ratio is taken between neighbours in time. The same number of swap buffers for both. Losses must be the same, bit for bit.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

REPOSITORY = Path(__file__).resolve().parent.parent
WARM_UP = 3  # the first steps make the states, and decide what stays in memory
Swappers = Literal["theirs", "ours"]


@dataclass(frozen=True)
class Case:
    """A model of ``layers`` square matrices of ``width``, each sub-group ``layers_per_group`` of them."""

    name: str
    width: int
    layers: int
    layers_per_group: int
    buffer_count: int
    pipelined: bool

    @property
    def parameters(self) -> int:
        return self.width * self.width * self.layers


CASES = (
    Case("33 M, 16 buffers, pipelined", 2048, 8, 1, 16, True),
    Case("33 M, 5 buffers, not pipelined", 2048, 8, 1, 5, False),
    Case("134 M, 16 buffers, pipelined", 2048, 32, 4, 16, True),
    Case("134 M, 5 buffers, not pipelined", 2048, 32, 4, 5, False),
)


@dataclass(frozen=True)
class Figures:
    """``ratio``: how many times as fast as DeepSpeed's classes ours are, the median over neighbouring steps."""

    case: Case
    groups: int
    theirs_seconds: float
    ours_seconds: float
    ratio: float
    ratios: list[float]
    theirs_backward_seconds: float
    ours_backward_seconds: float
    theirs_peak_bytes: int
    ours_peak_bytes: int
    same_losses: bool


def measure(python: str, directory: Path, case: Case, steps: int) -> Figures:
    """Run one case, ``steps`` steps of each after those to warm up. ``python``: an interpreter that has DeepSpeed.

    Raises RuntimeError with a contender's output if it ends early.
    """
    contenders = {whose: _Contender(python, directory, case, whose) for whose in ("theirs", "ours")}
    try:
        groups = {contender.read()["groups"] for contender in contenders.values()}
        rounds = [{whose: contender.step() for whose, contender in contenders.items()} for _ in range(WARM_UP + steps)]
    finally:
        for contender in contenders.values():
            contender.close()
    measured = rounds[WARM_UP:]

    def median(whose: Swappers, figure: str) -> float:
        return statistics.median(each[whose][figure] for each in measured)

    ratios = [each["theirs"]["step"] / each["ours"]["step"] for each in measured]
    return Figures(
        case=case,
        groups=groups.pop(),
        theirs_seconds=median("theirs", "step"),
        ours_seconds=median("ours", "step"),
        ratio=statistics.median(ratios),
        ratios=ratios,
        theirs_backward_seconds=median("theirs", "backward"),
        ours_backward_seconds=median("ours", "backward"),
        theirs_peak_bytes=rounds[-1]["theirs"]["peak"],
        ours_peak_bytes=rounds[-1]["ours"]["peak"],
        same_losses=all(each["theirs"]["loss"] == each["ours"]["loss"] for each in rounds),
    )


class _Contender:
    """A process that trains, one step each time it is told to."""

    def __init__(self, python: str, directory: Path, case: Case, whose: str) -> None:
        self._directory = tempfile.mkdtemp(prefix="swap-zero-step-", dir=directory)
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
        alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        self._process = subprocess.Popen(
            [python, __file__, "--worker", json.dumps({"directory": self._directory, "swappers": whose, **asdict(case)})],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env={**os.environ, **alone, "PYTHONPATH": path, "DS_ACCELERATOR": "cpu"},
        )

    def read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("FIGURES "):  # DeepSpeed prints as well
                figures: dict[str, Any] = json.loads(line.removeprefix("FIGURES "))
                return figures
        self._errors.seek(0)
        raise RuntimeError(f"a contender ended with {self._process.wait()}:\n{self._errors.read()[-4000:]}")

    def step(self) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write("step\n")
        self._process.stdin.flush()
        return self.read()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        self._errors.close()
        shutil.rmtree(self._directory, ignore_errors=True)


def work(settings: dict[str, Any]) -> None:
    """What a contender does, in an interpreter that has DeepSpeed."""
    import resource

    import deepspeed
    import torch
    from deepspeed.runtime.swap_tensor import partitioned_optimizer_swapper, pipelined_optimizer_swapper
    from deepspeed.runtime.zero import stage3

    from deepnvme.ops.op_builder import AsyncIOBuilder
    from deepnvme.swap import zero

    for module in (partitioned_optimizer_swapper, pipelined_optimizer_swapper):
        module.AsyncIOBuilder = AsyncIOBuilder
    if settings["swappers"] == "ours":
        stage3.PartitionedOptimizerSwapper = zero.PartitionedOptimizerSwapper
        stage3.PipelinedOptimizerSwapper = zero.PipelinedOptimizerSwapper

    torch.manual_seed(0)
    width = settings["width"]
    layers: list[torch.nn.Module] = []
    for _ in range(settings["layers"]):
        layers += [torch.nn.Linear(width, width, bias=False), torch.nn.Tanh()]
    model = torch.nn.Sequential(*layers)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {
            "stage": 3,
            "sub_group_size": width * width * settings["layers_per_group"],
            "stage3_param_persistence_threshold": 0,
            "offload_optimizer": {
                "device": "nvme",
                "nvme_path": settings["directory"],
                "buffer_count": settings["buffer_count"],
                "pipeline_read": settings["pipelined"],
                "pipeline_write": settings["pipelined"],
            },
        },
        "aio": {"block_size": 1 << 20, "queue_depth": 32, "overlap_events": True},
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    _print({"groups": len(engine.optimizer.fp16_groups)})
    batch = torch.randn(4, width)
    for _ in sys.stdin:
        started = time.perf_counter()
        loss = (engine(batch) - batch).pow(2).mean()
        engine.backward(loss)
        between = time.perf_counter()
        engine.step()
        ended = time.perf_counter()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        _print({"backward": between - started, "step": ended - between, "loss": loss.item().hex(), "peak": peak})


def _print(figures: dict[str, Any]) -> None:
    print("FIGURES " + json.dumps(figures), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--deepspeed-python", help="an interpreter that has DeepSpeed 0.19.8, torch, ninja and pybind11")
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()), help="a directory on the drive")
    parser.add_argument("--steps", type=int, default=8, help="steps of each contender that count")
    parser.add_argument("--only", help="cases whose name contains this")
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    parser.add_argument("--worker", type=json.loads, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work(arguments.worker)
        return
    if not arguments.deepspeed_python:
        parser.error("--deepspeed-python is needed")
    results = []
    for case in CASES:
        if not arguments.only or arguments.only in case.name:
            results.append(asdict(measure(arguments.deepspeed_python, arguments.dir, case, arguments.steps)))
            print(json.dumps(results[-1]), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
