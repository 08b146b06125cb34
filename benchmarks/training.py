"""Training with everything on the drive: against training in memory, the drive's own limits, and DeepSpeed's ZeRO stage 3.

    python benchmarks/training.py --dir /mnt/nvme --json training.json --deepspeed-python ~/deepspeed/bin/python

Each contender has a process of its own and makes a step in its turn: a ratio is taken round by round, between neighbours in time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from harness import drive, training_dtype, training_identity
from harness.command_line import Parser, Progress, measuring, print_step, write_json
from harness.comparison import Comparison, Comparisons, Counts, judge, measure_interleaved, over_limit, times_as_fast
from harness.documents import all_comparisons, document
from harness.figures import Verdict
from harness.optimizer_steps import QUEUE_DEPTH, drive_limits, quieten
from harness.tables import spread_text, table, verdict_table
from harness.training_models import TrainingShape
from harness.worker_process import WorkerProcess
from harness.workloads import ContenderFailed

from deepnvme.tools.tune.command_line import positive
from deepnvme.tools.tune.figures import Spread
from deepnvme.tools.tune.folder import check_memory

MIB = 1 << 20
PARTS = ("identity", "compute", "drive", "deepspeed", "micro_batches", "memory")
MICRO_BATCHES = 4
IN_MEMORY, OFFLOADED, LIMITS, DEEPSPEED = "in memory", "offloaded", "limits", "DeepSpeed"
VERTICAL, HORIZONTAL = "vertical", "horizontal"
ABSENT = "not run: give --deepspeed-python"
KEEPING_FREED_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
"""For processes whose steps are timed: none waits for the kernel to give memory back."""
RETURNING_FREED_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(MIB)}
"""For the processes whose memory is measured: what is freed is not resident any more."""
BEYOND_BUDGET = 128 * MIB
LOSSES_UNLIKE = "losses apart from DeepSpeed's, relative to these, all rounds together"
LOSSES_ALIKE = {"bfloat16": 1e-2, "float32": 1e-4}
"""DeepSpeed's CPU Adam and order of sums are others, and a bit that differs in bfloat16 is one of eight."""


@dataclass(frozen=True)
class Settings:
    """The model, and how much to measure."""

    directory: Path
    deepspeed_python: str | None
    rounds: int
    compute_bound: TrainingShape
    drive_bound: TrainingShape
    """The same model with few tokens."""
    with_deepspeed: TrainingShape
    """As many parameters and few tokens. DeepSpeed's buffers have room for the largest parameter, so none is much larger."""
    why_this_dtype: str
    memory_budget: int
    """Bytes of blocks."""
    activation_budget: int | None
    """None: the share of the budget that is the default."""
    steps: int
    only: tuple[str, ...]

    @property
    def fits(self) -> bool:
        """Whether the model can be trained in memory, beside the offloaded one and what gradients in float32 take."""
        return self.in_memory + self.memory_budget < psutil.virtual_memory().available

    @property
    def in_memory(self) -> int:
        """Bytes of a training in memory."""
        return 3 * self.drive_bound.nbytes // 2

    @property
    def in_parts(self) -> int:
        """Bytes of parameters, gradients, and the states of one layer."""
        shape = self.drive_bound
        return (2 * shape.elements + 8 * shape.layer_elements) * shape.torch_dtype.itemsize


@dataclass
class Measurements(Comparisons):
    """Everything one run found out."""

    described: dict[str, Any] = field(default_factory=dict)
    memory: dict[str, int] = field(default_factory=dict)


def measure(settings: Settings, progress: Progress) -> Measurements:
    """Run everything in a directory of its own below ``settings.directory``, which is empty again afterwards."""
    # On the drive two versions of everything, by two contenders.
    in_memory = settings.in_memory if settings.fits else settings.in_parts
    check_memory(in_memory + 2 * settings.memory_budget, "give fewer --parameters")
    drive.check(settings.directory, 4 * settings.drive_bound.nbytes + (1 << 30))
    if settings.why_this_dtype:
        progress(f"--dtype {settings.drive_bound.dtype}: {settings.why_this_dtype}")
    measurements = Measurements()
    parts = {
        "identity": compare_bits,
        "compute": compare_compute_bound,
        "drive": compare_drive_bound,
        "deepspeed": compare_with_deepspeed,
        "micro_batches": compare_micro_batches,
        "memory": compare_memory,
    }
    for name in settings.only:
        with tempfile.TemporaryDirectory(prefix="training-", dir=settings.directory) as directory:
            parts[name](settings, Path(directory), measurements, progress)
    return measurements


def compare_bits(settings: Settings, directory: Path, measurements: Measurements, progress: Progress) -> None:
    """Whether training with everything on the drive gives the same bits."""
    measurements.verdicts += training_identity.compare(directory, settings.steps, progress)


# -- contenders --------------------------------------------------------------------------------------------------------

Starts = Mapping[str, Callable[[], contextlib.AbstractContextManager[WorkerProcess]]]


@contextlib.contextmanager
def worker(
    settings: Settings, shape: TrainingShape, directory: Path, way: str, variables: dict[str, str], **options: Any
) -> Iterator[WorkerProcess]:
    """A process that trains; its files are removed in the end."""
    directory.mkdir()
    given = {"shape": dataclasses.asdict(shape), "way": way, "directory": str(directory), **options}
    if way == OFFLOADED:
        given |= {
            "memory_budget": settings.memory_budget,
            "activations": "nvme",
            "activation_budget": settings.activation_budget,
        }
    with WorkerProcess(sys.executable, "harness.training_worker", [json.dumps(given)], directory, variables) as process:
        yield process
        process.call("close")


@contextlib.contextmanager
def deepspeed(settings: Settings, shape: TrainingShape, directory: Path) -> Iterator[WorkerProcess]:
    """A process that trains in DeepSpeed's stage 3 with its own op."""
    assert settings.deepspeed_python is not None
    directory.mkdir()
    given = {
        "shape": dataclasses.asdict(shape),
        "directory": str(directory),
        "memory_budget": settings.memory_budget,
        "queue_depth": QUEUE_DEPTH,
    }
    arguments, variables = [json.dumps(given)], KEEPING_FREED_MEMORY
    with WorkerProcess(settings.deepspeed_python, "harness.training_deepspeed", arguments, directory, variables) as process:
        yield process


def step_interleaved(
    title: str,
    starts: Starts,
    settings: Settings,
    directory: Path,
    measurements: Measurements,
    progress: Progress,
    limits: bool = False,
) -> Comparison[str, Counts]:
    """Contenders each in a process. One that cannot start takes no part. ``limits``: the drive itself takes turns too."""
    contenders: dict[str, Callable[[], Counts]] = {}
    absent = {}

    def stepper(process: WorkerProcess) -> Callable[[], Counts]:
        def step() -> Counts:
            quieten(directory)
            return process.call("step")

        return step

    with contextlib.ExitStack() as stack:
        for name, start in starts.items():
            progress(f"{title}: starting {name}")
            try:
                process = stack.enter_context(start())
            except ContenderFailed as error:
                absent[name] = str(error)
                continue
            measurements.described[f"{title}, {name}"] = process.described
            contenders[name] = stepper(process)
        if limits:
            nbytes = min(settings.drive_bound.nbytes, 1 << 30)
            measured = stack.enter_context(drive_limits(directory / "limits", nbytes, settings.rounds))
            # Next to what is compared with them, whichever way round.
            contenders = {LIMITS: measured, **contenders}
        comparison = measure_interleaved(title, contenders, settings.rounds, progress)
    comparison.absent |= absent
    comparison.samples |= {name: [] for name in absent}
    measurements.comparisons[title] = comparison
    return comparison


# -- rows --------------------------------------------------------------------------------------------------------------


def compare_compute_bound(settings: Settings, directory: Path, measurements: Measurements, progress: Progress) -> None:
    """Many tokens."""
    compare_with_limits("compute-bound", settings.compute_bound, settings, directory, measurements, progress)


def compare_drive_bound(settings: Settings, directory: Path, measurements: Measurements, progress: Progress) -> None:
    """Few tokens."""
    compare_with_limits("drive-bound", settings.drive_bound, settings, directory, measurements, progress)


def compare_with_limits(
    kind: str, shape: TrainingShape, settings: Settings, directory: Path, measurements: Measurements, progress: Progress
) -> None:
    """With one micro-batch."""
    title = f"{kind}: {size_of(shape)}"
    way = IN_MEMORY if settings.fits else "in parts"
    starts: Starts = {
        OFFLOADED: lambda: worker(settings, shape, directory / OFFLOADED, OFFLOADED, KEEPING_FREED_MEMORY),
        IN_MEMORY: lambda: worker(settings, shape, directory / IN_MEMORY, way, KEEPING_FREED_MEMORY),
    }
    comparison = step_interleaved(title, starts, settings, directory, measurements, progress, limits=True)
    computing = "in memory" if settings.fits else "in memory, of which the optimizer for one layer"
    what = f"{title}, budget {size_text(settings.memory_budget)}: step / max({computing}, bytes moved / the drive's limits)"
    measurements.verdicts.append(judge(comparison, what, (OFFLOADED, LIMITS, IN_MEMORY), over_limit, "at most", 1.2))


def compare_with_deepspeed(settings: Settings, directory: Path, measurements: Measurements, progress: Progress) -> None:
    """With ZeRO-3, parameters and optimizer on the drive, its own op, and as much memory for buffers."""
    shape = settings.with_deepspeed
    title = f"DeepSpeed, drive-bound: {size_of(shape)}"
    comparison: Comparison[str, Counts] = Comparison()
    if settings.deepspeed_python is not None:
        starts: Starts = {
            OFFLOADED: lambda: worker(settings, shape, directory / OFFLOADED, OFFLOADED, KEEPING_FREED_MEMORY),
            DEEPSPEED: lambda: deepspeed(settings, shape, directory / DEEPSPEED),
        }
        comparison = step_interleaved(title, starts, settings, directory, measurements, progress)
    pair, bound = (OFFLOADED, DEEPSPEED), LOSSES_ALIKE[shape.dtype]
    what = f"{title}, memory for buffers {size_text(settings.memory_budget)}"
    theirs = measurements.described.get(f"{title}, {DEEPSPEED}")
    if theirs is not None:
        buffers = theirs["buffer_bytes"]
        what += f", DeepSpeed's {size_text(buffers)} and beside them {size_text(theirs['growth'] - buffers)}"
    alike = judge(comparison, f"{title}: {LOSSES_UNLIKE}", pair, loss_differs, "at most", bound, ABSENT, summed=True)
    if alike.met is False:
        comparison.absent[DEEPSPEED] = "it has trained another model: see its losses"
    faster = judge(comparison, f"{what}: times as fast as ZeRO-3 with its own op", pair, times_as_fast, "at least", 2.5, ABSENT)
    measurements.verdicts += [faster, alike]


def loss_differs(ours: Counts, theirs: Counts) -> float:
    """How far two losses are apart, relative to theirs; NaN, which nothing equals, infinitely."""
    loss, expected = (float.fromhex(counts["loss"]) for counts in (ours, theirs))
    difference = abs(loss - expected) / abs(expected)
    return difference if difference == difference else float("inf")


def compare_micro_batches(settings: Settings, directory: Path, measurements: Measurements, progress: Progress) -> None:
    """Each block computes all micro-batches in turn, or each micro-batch goes through all blocks."""
    # Together as many tokens as where there is one micro-batch: four times as many would be bound by computing on few cores.
    whole = settings.drive_bound
    tokens = max(whole.tokens // MICRO_BATCHES, 1)
    shape = dataclasses.replace(whole, sequences=MICRO_BATCHES * whole.sequences, tokens=tokens)
    title = f"{MICRO_BATCHES} micro-batches, drive-bound: {size_of(shape)}"

    def start(accumulation: str) -> contextlib.AbstractContextManager[WorkerProcess]:
        given = {"micro_batches": MICRO_BATCHES, "accumulation": accumulation}
        return worker(settings, shape, directory / accumulation, OFFLOADED, KEEPING_FREED_MEMORY, **given)

    starts: Starts = {VERTICAL: lambda: start(VERTICAL), HORIZONTAL: lambda: start(HORIZONTAL)}
    comparison = step_interleaved(title, starts, settings, directory, measurements, progress)
    what = f"{title}: vertical, times as fast as horizontal"
    measurements.verdicts.append(judge(comparison, what, (VERTICAL, HORIZONTAL), times_as_fast, "at least", 2.0))


def compare_memory(settings: Settings, directory: Path, measurements: Measurements, progress: Progress) -> None:
    """Peak memory of steps beyond what the process has before there is a model, in a fresh process."""
    shape = settings.drive_bound
    progress("peak memory")
    with worker(settings, shape, directory / OFFLOADED, OFFLOADED, RETURNING_FREED_MEMORY) as process:
        growth = process.call("peak", steps=3)["growth"]
        measurements.described["peak memory"] = process.described
    measurements.memory["growth"] = growth
    what = (
        f"peak memory, {size_of(shape)} with {size_text(shape.nbytes)} of parameters, gradients and states,"
        f" budget {size_text(settings.memory_budget)}"
    )
    allowed = round((settings.memory_budget + BEYOND_BUDGET) / MIB, 1)
    measurements.verdicts.append(Verdict(what, Spread.of([growth / MIB]), "at most", allowed, "MiB"))


# -- the command line --------------------------------------------------------------------------------------------------


def size_of(shape: TrainingShape) -> str:
    return f"{shape.elements / 1e6:.0f} M parameters in {shape.dtype}, {shape.sequences} x {shape.tokens} tokens"


def size_text(nbytes: int) -> str:
    return f"{nbytes / MIB:.0f} MiB"


def step_table(title: str, comparison: Comparison[str, Counts]) -> str:
    """Seconds and bytes of each contender, and the drive's limits: medians."""
    columns = {"cpu_seconds": (1.0, 2), "bytes_read": (1e9, 2), "bytes_written": (1e9, 2)}
    columns |= {"read": (1e9, 2), "write": (1e9, 2)}
    rows = []
    for who, samples in comparison.samples.items():
        cells = ["-"] * (len(columns) + 1)
        if samples:
            cells = [spread_text(Spread.of([sample["seconds"] for sample in samples]), 3)] + [
                f"{Spread.of([sample[key] / unit for sample in samples]).median:.{digits}f}" if key in samples[0] else "-"
                for key, (unit, digits) in columns.items()
            ]
        rows.append([who, *cells, comparison.absent.get(who, "")])
    header = ["contender", "s, median (quartiles)", "CPU s", "GB read", "GB written", "GB/s read", "write", ""]
    return table(title, header, rows, left=1)


def as_json(settings: Settings, measurements: Measurements, started: str) -> dict[str, Any]:
    figures = {
        "contenders": measurements.described,
        "comparisons": all_comparisons(measurements.comparisons),
        "memory": measurements.memory,
    }
    return document("training", started, settings, measurements.verdicts, **figures)


def shape_of(parameters: int, width: int, sequences: int, tokens: int, vocabulary: int, dtype: str = "bfloat16") -> TrainingShape:
    """The model of that width that has this many parameters, as nearly as layers allow it."""
    one = TrainingShape(width, 1, vocabulary, sequences, tokens, dtype=dtype)
    layers = round((parameters - one.elements) / one.layer_elements) + 1
    return dataclasses.replace(one, layers=max(2, layers))


def parse_arguments(arguments: list[str] | None) -> tuple[Settings, Path | None]:
    parser = Parser(__doc__)
    parser.add_deepspeed_python()
    parser.add_argument("--only", choices=PARTS, action="append", help="a part of it; can be given more than once")
    parser.add_argument("--rounds", type=positive, help="steps of each contender (default: 3)")
    parser.add_argument("--parameters", type=positive, metavar="M", help="of the model, in millions (default: 250)")
    parser.add_argument("--width", type=positive, help="of the model, a multiple of 64 (default: 1024, from 1000 M on 2048)")
    parser.add_argument(
        "--dtype",
        choices=("auto", "bfloat16", "float32"),
        default="auto",
        help="of parameters: bfloat16 with master weights in float32, or float32 without (default: auto, bfloat16 unless its"
        " matrix products take more than twice as long here)",
    )
    parser.add_argument("--tokens", type=positive, help="in each of 2 sequences where computing takes longest (default: 1024)")
    parser.add_argument("--few-tokens", type=positive, metavar="N", help="in one sequence where the drive does (default: 32)")
    parser.add_argument(
        "--budget-share", type=positive, metavar="N", help="memory_budget is 1/N of parameters, gradients and states (default: 4)"
    )
    parser.add_argument(
        "--activation-mib", type=positive, metavar="MIB", help="activation_budget (default: a quarter of the budget)"
    )
    parser.add_argument("--quick", action="store_true", help="a trial of the benchmark itself: tiny")
    given = parser.parse(arguments)
    quick = given.quick
    parameters = (given.parameters or (1 if quick else 250)) * 10**6
    width = given.width or (128 if quick else 1024 if parameters < 10**9 else 2048)
    if width % 64:
        parser.error(f"--width: {width} is not a multiple of 64")
    vocabulary = 512 if quick else 8192
    few_tokens = given.few_tokens or (8 if quick else 32)
    few = shape_of(parameters, width, 1, few_tokens, vocabulary)
    dtype, why = given.dtype, ""
    if dtype == "auto":
        dtype, why = training_dtype.choose(width, few.feed_forward, few_tokens)
    few = dataclasses.replace(few, dtype=dtype)
    settings = Settings(
        directory=given.dir,
        deepspeed_python=given.deepspeed_python,
        rounds=given.rounds or (2 if quick else 3),
        compute_bound=dataclasses.replace(few, sequences=2, tokens=given.tokens or (64 if quick else 1024)),
        drive_bound=few,
        with_deepspeed=shape_of(parameters, width, 1, few_tokens, min(vocabulary, 2 * width), dtype),
        why_this_dtype=why,
        memory_budget=few.nbytes // (given.budget_share or 4),
        activation_budget=given.activation_mib and given.activation_mib * MIB,
        steps=2 if quick else 20,
        only=tuple(given.only or PARTS),
    )
    return settings, given.json


def main(arguments: list[str] | None = None) -> int:
    settings, json_path = parse_arguments(arguments)
    with measuring("training") as started:
        measurements = measure(settings, print_step)
    for title, comparison in measurements.comparisons.items():
        print(step_table(title, comparison))
    print(verdict_table(measurements.verdicts))
    write_json(json_path, as_json(settings, measurements, started))
    return 1 if any(comparison.absent for comparison in measurements.comparisons.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
