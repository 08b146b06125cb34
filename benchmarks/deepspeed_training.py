"""DeepSpeed's ZeRO stage 3 with its optimizer's states on the drive: as it is, on our op, and on our op with our swappers.

    python benchmarks/deepspeed_training.py --dir /mnt/nvme --json training.json --deepspeed-python ~/deepspeed/bin/python

Each contender has a process of its own and trains some steps in its turn: a ratio is taken round by round, between neighbours in
time. The interpreter needs DeepSpeed only: this package is what the benchmark itself runs on.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from harness import drive
from harness.command_line import Parser, Progress, measuring, print_step, write_json
from harness.comparison import Comparison, Comparisons, Counts, judge, measure_interleaved, times_as_fast
from harness.documents import all_comparisons, document
from harness.optimizer_steps import QUEUE_DEPTH, Library, Model, quieten, start_deepspeed
from harness.tables import spread_text, table, verdict_table
from harness.worker_process import WorkerProcess
from harness.workloads import ContenderFailed

from deepnvme.tools.tune.command_line import positive
from deepnvme.tools.tune.figures import Spread
from deepnvme.tools.tune.folder import check_memory

MIB = 1 << 20
BUFFERS = 16
SUB_GROUPS = 8
ALONE, OP, SWAPPERS = "DeepSpeed alone", "our op", "our op and swappers"
CONTENDERS: dict[str, tuple[Library, Library]] = {
    ALONE: ("deepspeed", "deepspeed"),
    OP: ("deepnvme", "deepspeed"),
    SWAPPERS: ("deepnvme", "deepnvme"),
}
"""Whose op, and whose swappers."""
PARTS = ("time", "memory")
AT_ONCE = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
"""Has glibc give back at once what is larger."""
NOT_ABOVE = 1.01
"""The memory of a whole process, its libraries included, is known to a few MiB."""
ABSENT = "give --deepspeed-python"


@dataclass(frozen=True)
class Settings:
    """What to train, and how long."""

    directory: Path
    deepspeed_python: str | None
    rounds: int
    models: tuple[Model, ...]
    steps: int
    """Of each turn."""
    queue_depth: int | None
    only: tuple[str, ...]


@dataclass
class Measurements(Comparisons):
    """Everything one run found out."""

    described: dict[str, Any] = field(default_factory=dict)


def measure(settings: Settings, progress: Progress) -> Measurements:
    """Run everything in a directory of its own below ``settings.directory``, which is empty again afterwards."""
    states = max(model.state_bytes for model in settings.models)
    # At a time. Each has its weights and gradients in memory, and buffers for two thirds of its states; files of all states.
    check_memory(len(CONTENDERS) * 2 * states, "give fewer --layers")
    drive.check(settings.directory, len(CONTENDERS) * 2 * states)
    measurements = Measurements()
    parts = {"time": compare_time, "memory": compare_memory}
    for model in settings.models:
        for name in settings.only:
            with tempfile.TemporaryDirectory(prefix="deepspeed_training-", dir=settings.directory) as directory:
                parts[name](settings, model, Path(directory), measurements, progress)
    return measurements


def compare_time(settings: Settings, model: Model, directory: Path, measurements: Measurements, progress: Progress) -> None:
    """All contenders train the same model in turns: the seconds of a step are compared, and the losses."""
    size = size_of(model)
    comparison: Comparison[str, Counts] = Comparison()
    if settings.deepspeed_python is not None:
        contenders, absent = {}, {}
        with contextlib.ExitStack() as stack:
            for name in CONTENDERS:
                progress(f"{size}: starting {name} (DeepSpeed compiles its ops on first use: minutes)")
                try:
                    process = stack.enter_context(start(name, settings, model, directory))
                except ContenderFailed as error:
                    absent[name] = str(error)
                    continue
                measurements.described[f"{size}, {name}"] = process.described
                contenders[name] = trainer(process, directory, settings.steps)
            comparison = measurements.comparisons[size] = measure_interleaved(size, contenders, settings.rounds, progress)
        comparison.absent |= absent
    for ours, bound in ((OP, 1.1), (SWAPPERS, 1.8)):
        what, pair = f"{size}, {ours} / {ALONE}", (ours, ALONE)
        measurements.verdicts += [
            judge(comparison, f"{what}: a step, times as fast", pair, times_as_fast, "at least", bound, ABSENT),
            judge(comparison, f"{what}: turns with losses that differ", pair, losses_differ, "at most", 0, ABSENT, summed=True),
        ]


def compare_memory(settings: Settings, model: Model, directory: Path, measurements: Measurements, progress: Progress) -> None:
    """Of processes whose allocator keeps nothing large that was given back, since that is luck and not a need."""
    size = size_of(model)
    comparison: Comparison[str, Counts] = Comparison()
    if settings.deepspeed_python is not None:

        def trained(name: str) -> Counts:
            with start(name, settings, model, directory, AT_ONCE) as process:
                return process.call("train", steps=settings.steps)

        comparison = measure_interleaved(f"{size}, memory", {name: partial(trained, name) for name in CONTENDERS}, 1, progress)
        measurements.comparisons[f"{size}, memory"] = comparison
    for ours in (OP, SWAPPERS):
        for what, figure in (("training", "peak"), ("starting", "peak_of_start")):
            text = f"{size}, {ours} / {ALONE}: peak memory, {what}"
            measurements.verdicts.append(judge(comparison, text, (ours, ALONE), ratio(figure), "at most", NOT_ABOVE, ABSENT))


def size_of(model: Model) -> str:
    return f"{model.elements // 10**6} M parameters"


def start(
    name: str, settings: Settings, model: Model, directory: Path, variables: Mapping[str, str] | None = None
) -> WorkerProcess:
    """A process in which a contender has a model and its optimizer, ready to train."""
    assert settings.deepspeed_python is not None
    op, swappers = CONTENDERS[name]
    return start_deepspeed(
        settings.deepspeed_python,
        directory / name,
        model,
        sub_group=model.elements // SUB_GROUPS,
        buffers=BUFFERS,
        pipelined=True,
        op=op,
        classes=swappers,
        queue_depth=settings.queue_depth,
        variables=variables,
    )


def trainer(process: WorkerProcess, directory: Path, steps: int) -> Callable[[], Counts]:
    """A contender that trains some steps. It starts from a quiet drive, with nothing of ``directory`` in the page cache."""

    def train() -> Counts:
        quieten(directory)
        return process.call("train", steps=steps)

    return train


def ratio(field: str) -> Callable[[Counts, Counts], float]:
    """A figure for verdicts: ours divided by theirs."""

    def of(ours: Counts, theirs: Counts) -> float:
        return float(ours[field] / theirs[field])

    return of


def losses_differ(ours: Counts, theirs: Counts) -> float:
    """A figure for verdicts: 1 if any loss differs, else 0."""
    return float(ours["losses"] != theirs["losses"])


# -- the command line --------------------------------------------------------------------------------------------------


def training_table(title: str, comparison: Comparison[str, Counts]) -> str:
    rows = []
    for name in CONTENDERS:
        samples = comparison.samples.get(name)
        cells = ["-"] * 4
        if samples:
            spreads = [Spread.of([sample[field] for sample in samples]) for field in ("seconds", "whole_seconds")]
            peaks = [max(sample[field] for sample in samples) for field in ("peak", "peak_of_start")]
            cells = [*(spread_text(spread, 3) for spread in spreads), *(f"{peak / MIB:.0f}" for peak in peaks)]
        rows.append([name, *cells, comparison.absent.get(name, "")])
    header = ["", "s/step, median (quartiles)", "forward and backward too", "peak MiB, training", "starting", ""]
    return table(title, header, rows, left=1)


def as_json(settings: Settings, measurements: Measurements, started: str) -> dict[str, Any]:
    figures = {"contenders": measurements.described, "comparisons": all_comparisons(measurements.comparisons)}
    return document("deepspeed_training", started, settings, measurements.verdicts, **figures)


def parse_arguments(arguments: Sequence[str] | None) -> tuple[Settings, Path | None]:
    parser = Parser(__doc__)
    parser.add_deepspeed_python()
    parser.add_argument("--only", choices=PARTS, action="append", help="a part of it; can be given more than once")
    parser.add_argument("--rounds", type=positive, help="turns of each contender (default: 7)")
    parser.add_argument("--steps", type=positive, help="of training in a turn (default: 4)")
    parser.add_argument("--width", type=positive, help="of the models' square matrices (default: 2048)")
    parser.add_argument(
        "--layers",
        type=positive,
        action="append",
        help=f"matrices of a model, a multiple of {SUB_GROUPS}; can be given more than once "
        "(default: 8 and 32, with 33 M and 134 M parameters)",
    )
    parser.add_argument(
        "--no-aio", action="store_true", help=f"no aio block in the JSON: a queue of 8, DeepSpeed's default, not {QUEUE_DEPTH}"
    )
    parser.add_argument("--quick", action="store_true", help="a trial of the benchmark itself: tiny")
    given = parser.parse(arguments)
    layers: list[int] = given.layers or ([8] if given.quick else [8, 32])
    for count in layers:
        if count % SUB_GROUPS:
            parser.error(f"--layers: {count} is not a multiple of {SUB_GROUPS}")
    settings = Settings(
        directory=given.dir,
        deepspeed_python=given.deepspeed_python,
        rounds=given.rounds or (2 if given.quick else 7),
        models=tuple(Model(given.width or (512 if given.quick else 2048), count) for count in layers),
        steps=given.steps or (2 if given.quick else 4),
        queue_depth=None if given.no_aio else QUEUE_DEPTH,
        only=tuple(given.only or PARTS),
    )
    return settings, given.json


def main(arguments: Sequence[str] | None = None) -> int:
    settings, json_path = parse_arguments(arguments)
    with measuring("deepspeed_training") as started:
        measurements = measure(settings, print_step)
    for title, comparison in measurements.comparisons.items():
        print(training_table(title, comparison))
    print(verdict_table(measurements.verdicts))
    write_json(json_path, as_json(settings, measurements, started))
    return 1 if any(comparison.absent for comparison in measurements.comparisons.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
