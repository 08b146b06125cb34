"""Activations on the drive: save_on_disk against memory, the drive's own limits, torch's save_on_cpu and a hook with torch.save.

    python benchmarks/activations.py --dir /mnt/nvme --json activations.json

All ways to keep activations make their steps in turn: a ratio is taken round by round, between neighbours in time.
The part with transformers' Trainer needs transformers and accelerate.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from harness import activation_identity, drive
from harness.activation_models import ChainShape, GPTShape
from harness.activation_worker import (
    IN_MEMORY,
    OFFLOADED,
    OFFLOADED_WITH_ROOM,
    ON_CPU,
    ON_CPU_COPIED,
    TORCH_SAVE,
    TORCH_SAVE_CACHED,
)
from harness.command_line import Parser, Progress, measuring, print_step, write_json
from harness.comparison import Comparison, Comparisons, Counts, judge, measure_interleaved, over_limit, times_as_fast
from harness.documents import all_comparisons, document
from harness.figures import Verdict
from harness.optimizer_steps import quieten
from harness.tables import comparison_table, table, verdict_table
from harness.worker_process import WorkerProcess

from deepnvme.tools.tune.command_line import positive
from deepnvme.tools.tune.figures import Spread
from deepnvme.tools.tune.folder import check_memory

MIB = 1 << 20
PARTS = ("identity", "compute", "drive", "memory", "transformers")
LIMITS = "limits"
KEEPING_FREED_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
"""For the process whose steps are timed: glibc keeps what was freed, so that no step waits for the kernel or a hypervisor to give
memory back. That is 0.2 to 0.5 GB/s on machines that report free memory, and would decide every ratio."""
RETURNING_FREED_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(MIB)}
"""For the processes whose memory is measured: what is freed is not resident any more."""


@dataclass(frozen=True)
class Settings:
    """The models, and how much to measure."""

    directory: Path
    rounds: int
    gpt: GPTShape
    chain: ChainShape
    budget_share: int
    """memory_budget is what the model saves, divided by this."""
    steps: int
    """Of each training whose bits are compared."""
    trainer: dict[str, int]
    trainer_steps: int
    only: tuple[str, ...]

    @property
    def chain_bytes(self) -> int:
        return self.chain.nbytes * self.chain.length

    @property
    def gpt_bytes(self) -> int:
        """What a step saves, roughly; the worker counts it exactly."""
        return 17 * 4 * self.gpt.width * self.gpt.layers * self.gpt.sequences * self.gpt.tokens


@dataclass
class Measurements(Comparisons):
    """Everything one run found out."""

    saved_bytes: dict[str, int] = field(default_factory=dict)
    """Of a step of each model."""
    memory: list[dict[str, Any]] = field(default_factory=list)
    """Of each way to keep activations: the process's growth and what save_on_disk says itself."""
    trainer: dict[str, Counts] = field(default_factory=dict)


def measure(settings: Settings, progress: Progress) -> Measurements:
    """Run everything in a directory of its own below ``settings.directory``, which is empty again afterwards."""
    # All activations, a copy of them, and what is computed with.
    largest = max(settings.chain_bytes, settings.gpt_bytes)
    check_memory(3 * largest, "give fewer --layers or a shorter --chain")
    drive.check(settings.directory, 4 * largest)
    measurements = Measurements()
    parts = {
        "identity": compare_bits,
        "compute": compare_compute_bound,
        "drive": compare_drive_bound,
        "memory": compare_memory,
        "transformers": compare_trainers,
    }
    for name in settings.only:
        with tempfile.TemporaryDirectory(prefix="activations-", dir=settings.directory) as directory:
            parts[name](settings, Path(directory), measurements, progress)
    return measurements


def compare_bits(settings: Settings, directory: Path, measurements: Measurements, progress: Progress) -> None:
    """Whether training with activations on the drive gives the same bits."""
    measurements.verdicts += activation_identity.compare(directory, settings.steps, progress)


@contextlib.contextmanager
def worker(
    directory: Path, shape: GPTShape | ChainShape, memory_budget: int, variables: dict[str, str]
) -> Iterator[WorkerProcess]:
    """A process that makes steps; its files are removed in the end."""
    tiny: GPTShape | ChainShape = GPTShape(64, 1, 1, 16) if isinstance(shape, GPTShape) else ChainShape(1 << 16, 2)
    given = {"shape": asdict(shape), "directory": str(directory), "memory_budget": memory_budget, "tiny": asdict(tiny)}
    with WorkerProcess(sys.executable, "harness.activation_worker", [json.dumps(given)], directory, variables) as process:
        yield process
        process.call("close")


def stepper(process: WorkerProcess, directory: Path, way: str) -> Callable[[], Counts]:
    """A contender that makes a step, from a quiet drive."""

    def step() -> Counts:
        quieten(directory)
        return process.call("step", way=way)

    return step


def step_interleaved(
    title: str,
    shape: GPTShape | ChainShape,
    ways: Sequence[str],
    settings: Settings,
    directory: Path,
    measurements: Measurements,
    progress: Progress,
    limits: bool = False,
) -> Comparison[str, Counts]:
    """Have each way make its steps. ``limits``: the drive itself takes turns too, with the chain's tensors."""
    with worker(directory, shape, 0, RETURNING_FREED_MEMORY) as process:
        saved = measurements.saved_bytes[title] = process.call("saved_bytes")["saved_bytes"]
    with worker(directory, shape, saved // settings.budget_share, KEEPING_FREED_MEMORY) as process:
        contenders: dict[str, Callable[[], Counts]] = {way: stepper(process, directory, way) for way in ways}
        if limits:
            # Next to the way that is compared with them, whichever way round.
            given = {"nbytes": settings.chain.nbytes, "count": settings.chain.length}
            contenders = {IN_MEMORY: contenders[IN_MEMORY], LIMITS: partial(process.call, "limits", **given)} | contenders
        for way in [IN_MEMORY, *ways]:  # the first step in memory makes gradients, the second is what others are compared with
            progress(f"{title}: trying {way}")
            process.call("step", way=way)
        comparison = measure_interleaved(title, contenders, settings.rounds, progress)
    measurements.comparisons[title] = comparison
    differing = [
        judge(comparison, f"{title}: steps whose loss or gradients differ: {way}", (way,), differs, "at most", 0, summed=True)
        for way in ways
        if way.startswith(OFFLOADED)
    ]
    measurements.verdicts += differing
    return comparison


def differs(taken: Counts) -> float:
    """A figure for verdicts: 1 if the step's loss or gradients are not those of a step in memory, else 0."""
    return float(taken["differs"])


def times_as_long(ours: Counts, theirs: Counts) -> float:
    """A figure for verdicts: how many times as long ours takes."""
    seconds: float = ours["seconds"] / theirs["seconds"]
    return seconds


def compare_compute_bound(settings: Settings, directory: Path, measurements: Measurements, progress: Progress) -> None:
    """A GPT, which computes for long with what it saves."""
    ways = (IN_MEMORY, OFFLOADED, ON_CPU, ON_CPU_COPIED)
    title = "compute-bound: a GPT"
    comparison = step_interleaved(title, settings.gpt, ways, settings, directory, measurements, progress)
    share = f"memory_budget 1/{settings.budget_share} of the activations"
    measurements.verdicts += [
        judge(comparison, f"{title}, {share}: time / in memory", (OFFLOADED, IN_MEMORY), times_as_long, "at most", 1.05),
        judge(
            comparison,
            f"{title}, {share}: times as fast as save_on_cpu that copies",
            (OFFLOADED, ON_CPU_COPIED),
            times_as_fast,
            "at least",
            1.0,
        ),
    ]


def compare_drive_bound(settings: Settings, directory: Path, measurements: Measurements, progress: Progress) -> None:
    """A chain of element-wise functions, which computes for less time than its bytes take."""
    ways = (IN_MEMORY, OFFLOADED, OFFLOADED_WITH_ROOM, ON_CPU_COPIED, TORCH_SAVE, TORCH_SAVE_CACHED)
    title = "drive-bound: element-wise functions"
    comparison = step_interleaved(title, settings.chain, ways, settings, directory, measurements, progress, limits=True)
    share = f"memory_budget 1/{settings.budget_share} of the activations"
    measurements.verdicts += [
        judge(
            comparison,
            f"{title}, {share}: time / max(in memory, bytes / the drive's limits)",
            (OFFLOADED, LIMITS, IN_MEMORY),
            over_limit,
            "at most",
            1.15,
        ),
        judge(
            comparison,
            f"{title}, memory for all of them: times as fast as save_on_cpu that copies",
            (OFFLOADED_WITH_ROOM, ON_CPU_COPIED),
            times_as_fast,
            "at least",
            1.0,
        ),
        judge(
            comparison,
            f"{title}, {share}: times as fast as torch.save for each tensor, synced and not cached",
            (OFFLOADED, TORCH_SAVE),
            times_as_fast,
            "at least",
            5,
        ),
    ]


def compare_memory(settings: Settings, directory: Path, measurements: Measurements, progress: Progress) -> None:
    """Peak memory of the GPT's activations in fresh processes, from outside and as the report says."""
    with worker(directory, settings.gpt, 0, RETURNING_FREED_MEMORY) as process:
        saved = process.call("saved_bytes")["saved_bytes"]
    budget, layer = saved // settings.budget_share, saved // settings.gpt.layers
    what = f"a GPT that saves {saved / MIB:.0f} MiB, memory_budget {budget / MIB:.0f} MiB"
    allowed = round((budget + 2 * layer) / MIB, 1)
    for way in (IN_MEMORY, OFFLOADED):
        progress(f"peak memory, {way}")
        with worker(directory, settings.gpt, budget, RETURNING_FREED_MEMORY) as process:
            taken = process.call("peak", way=way, steps=3)
        measurements.memory.append({"way": way, "saved_bytes": saved, "memory_budget": budget, **taken})
        if way == OFFLOADED:
            note = "the kernel does not let peak memory be reset (/proc/self/clear_refs)"
            for how, nbytes in (("the process's growth", taken["growth"]), ("the report's peak_bytes", taken["peak_bytes"])):
                figure = None if nbytes is None else Spread.of([nbytes / MIB])
                text = f"{what}: {how}, budget + two layers"
                measurements.verdicts.append(Verdict(text, figure, "at most", allowed, "MiB", "" if figure else note))


def compare_trainers(settings: Settings, directory: Path, measurements: Measurements, progress: Progress) -> None:
    """transformers' Trainer with gradient checkpointing, each way in a process of its own."""
    what = "transformers' Trainer, gradient checkpointing: losses that differ with enable()"
    if missing := [name for name in ("transformers", "accelerate") if importlib.util.find_spec(name) is None]:
        measurements.verdicts.append(Verdict(what, None, "at most", 0, note=f"install {' and '.join(missing)}"))
        return
    for enabled, way in ((False, IN_MEMORY), (True, "enable()")):
        progress(f"transformers' Trainer, {way}")
        given = {"enabled": enabled, "directory": str(directory), "memory_budget": 0, **settings.trainer}
        variables = {**RETURNING_FREED_MEMORY, "HF_HUB_OFFLINE": "1"}
        with WorkerProcess(sys.executable, "harness.trainer_worker", [json.dumps(given)], directory, variables) as process:
            measurements.trainer[way] = process.call("train", steps=settings.trainer_steps)
    losses = [taken["losses"] for taken in measurements.trainer.values()]
    differing = sum(one != other for one, other in zip(*losses, strict=True))
    measurements.verdicts.append(Verdict(what, Spread.of([differing]), "at most", 0))


# -- the command line --------------------------------------------------------------------------------------------------


def step_table(title: str, comparison: Comparison[str, Counts]) -> str:
    """What the turns counted: CPU time, the forward's part of the time, bytes that moved, and waiting."""
    columns = {"cpu_seconds": (1.0, 2), "forward": (1.0, 3)}
    columns |= {"bytes_written": (1e6, 0), "bytes_read": (1e6, 0), "peak_bytes": (1e6, 0)}
    columns |= {"waiting_forward": (1.0, 3), "waiting_backward": (1.0, 3), "write": (1e9, 2), "read": (1e9, 2)}
    rows = [
        [who, *(f"{Spread.of([sample[key] / unit for sample in samples]).median:.{digits}f}" if key in samples[0] else "-"
                for key, (unit, digits) in columns.items())]
        for who, samples in comparison.samples.items()
        if samples
    ]  # fmt: skip
    waited = ["s waited forward", "backward"]
    header = ["contender", "CPU s", "s forward", "MB written", "MB read", "MB peak", *waited, "GB/s write", "read"]
    return table(f"{title}, medians", header, rows, left=1)


def memory_table(measurements: Measurements) -> str:
    """Peak memory: of the GPT's activations, and of transformers' Trainer."""

    def mib(nbytes: int | None) -> str:
        return "-" if nbytes is None else f"{nbytes / MIB:.0f}"

    rows = [[f"a GPT, {one['way']}", mib(one["growth"]), mib(one["peak_bytes"]), ""] for one in measurements.memory]
    rows += [
        [f"Trainer, {way}", mib(one["growth"]), mib(one.get("peak_bytes")), f"{one['seconds']:.2f} s a step"]
        for way, one in measurements.trainer.items()
    ]
    return table("Peak memory, MiB", ["", "the process's growth", "the report's peak_bytes", ""], rows, left=1)


def as_json(settings: Settings, measurements: Measurements, started: str) -> dict[str, Any]:
    figures = {
        "saved_bytes": measurements.saved_bytes,
        "comparisons": all_comparisons(measurements.comparisons),
        "memory": measurements.memory,
        "trainer": measurements.trainer,
    }
    return document("activations", started, settings, measurements.verdicts, **figures)


def parse_arguments(arguments: Sequence[str] | None) -> tuple[Settings, Path | None]:
    parser = Parser(__doc__)
    parser.add_argument("--only", choices=PARTS, action="append", help="a part of it; can be given more than once")
    parser.add_argument("--rounds", type=positive, help="steps of each contender (default: 7)")
    parser.add_argument("--width", type=positive, help="of the GPT (default: 512)")
    parser.add_argument("--layers", type=positive, help="of the GPT (default: 10)")
    parser.add_argument("--tokens", type=positive, help="in each of the GPT's 2 sequences (default: 1024)")
    parser.add_argument("--chain", type=positive, metavar="N", help="tensors that the chain saves (default: 96)")
    parser.add_argument("--chain-mib", type=positive, metavar="MIB", help="of each of them (default: 16)")
    parser.add_argument("--budget-share", type=positive, metavar="N", help="memory_budget is 1/N of the activations (default: 8)")
    parser.add_argument("--quick", action="store_true", help="a trial of the benchmark itself: tiny")
    given = parser.parse(arguments)
    quick = given.quick
    width = given.width or (128 if quick else 512)
    gpt = GPTShape(width, given.layers or (4 if quick else 10), 2, given.tokens or 1024)
    trainer = {"width": 64, "layers": 2, "sequences": 8, "tokens": 512} if quick else {
        "width": 128, "layers": 20, "sequences": 16, "tokens": 512
    }  # fmt: skip
    settings = Settings(
        directory=given.dir,
        rounds=given.rounds or (2 if quick else 7),
        gpt=gpt,
        chain=ChainShape(nbytes=(given.chain_mib or (4 if quick else 16)) * MIB, length=given.chain or (6 if quick else 96)),
        budget_share=given.budget_share or 8,
        steps=3 if quick else 20,
        trainer=trainer,
        trainer_steps=2 if quick else 3,
        only=tuple(given.only or PARTS),
    )
    return settings, given.json


def main(arguments: Sequence[str] | None = None) -> int:
    settings, json_path = parse_arguments(arguments)
    with measuring("activations") as started:
        measurements = measure(settings, print_step)
    for title, comparison in measurements.comparisons.items():
        print(comparison_table(title, comparison))
        print(step_table(title, comparison))
    if measurements.memory or measurements.trainer:
        print(memory_table(measurements))
    print(verdict_table(measurements.verdicts))
    write_json(json_path, as_json(settings, measurements, started))
    return 1 if any(comparison.absent for comparison in measurements.comparisons.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
