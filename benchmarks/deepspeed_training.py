"""DeepSpeed's ZeRO stage 3 with its optimizer's states on the drive: as it is, on our op, and on our op with our swappers.

    python benchmarks/deepspeed_training.py --dir /mnt/nvme --json training.json --deepspeed-python ~/deepspeed/bin/python

Each contender has a process of its own and trains some steps in its turn: a ratio is taken round by round, between neighbours in
time. The interpreter needs DeepSpeed only: this package is what the benchmark itself runs on.
"""

from __future__ import annotations

import contextlib
import datetime
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from harness import drive, machine
from harness.command_line import Parser, Progress, measuring, print_step, write_json
from harness.figures import Verdict
from harness.optimizer_steps import Library, Model, quieten, start_deepspeed
from harness.tables import spread_text, table, verdict_table
from harness.turns import Counts, Turns, judge, take_turns, times_as_fast
from harness.worker_process import WorkerProcess
from harness.workloads import ContenderFailed

from deepnvme.tune.arguments import positive
from deepnvme.tune.figures import Spread
from deepnvme.tune.room import check_memory

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
ABSENT = "give --deepspeed-python"


@dataclass(frozen=True)
class Settings:
    directory: Path
    deepspeed_python: str | None
    rounds: int
    models: tuple[Model, ...]
    steps: int
    """Of each turn."""
    queue_depth: int | None


@dataclass
class Measurements:
    verdicts: list[Verdict] = field(default_factory=list)
    turns: dict[str, Turns[str, Counts]] = field(default_factory=dict)
    described: dict[str, Any] = field(default_factory=dict)


def measure(settings: Settings, progress: Progress) -> Measurements:
    """Run everything in a directory of its own below ``settings.directory``, which is empty again afterwards."""
    states = max(model.state_bytes for model in settings.models)
    # At a time. Each has its weights and gradients in memory, and buffers for two thirds of its states; files of all states.
    check_memory(len(CONTENDERS) * 2 * states, "give fewer --layers")
    drive.check(settings.directory, len(CONTENDERS) * 2 * states)
    measurements = Measurements()
    for model in settings.models:
        with tempfile.TemporaryDirectory(prefix="deepspeed_training-", dir=settings.directory) as directory:
            compare(settings, model, Path(directory), measurements, progress)
    return measurements


def compare(settings: Settings, model: Model, directory: Path, measurements: Measurements, progress: Progress) -> None:
    name = f"{model.elements / 1e6:.0f} M parameters"
    turns: Turns[str, Counts] = Turns()
    if settings.deepspeed_python is not None:
        turns = measurements.turns[name] = train_in_turns(name, settings, model, directory, measurements, progress)
    for ours, bound in ((OP, 1.1), (SWAPPERS, 1.8)):
        pair = (ours, ALONE)
        row = partial(judge, turns, absence=ABSENT)
        what = f"{name}, {ours} / {ALONE}"
        measurements.verdicts += [
            row(f"{what}: a step, times as fast", pair, times_as_fast, "at least", bound),
            row(f"{what}: peak memory of training", pair, ratio("peak"), "at most", 1),
            row(f"{what}: peak memory until then", pair, ratio("peak_of_start"), "at most", 1),
            row(f"{what}: turns with losses that differ", pair, losses_differ, "at most", 0, summed=True),
        ]


def train_in_turns(
    name: str, settings: Settings, model: Model, directory: Path, measurements: Measurements, progress: Progress
) -> Turns[str, Counts]:
    """One that cannot start takes no part."""
    assert settings.deepspeed_python is not None
    contenders, absent = {}, {}
    with contextlib.ExitStack() as stack:
        for who, (op, swappers) in CONTENDERS.items():
            progress(f"{name}: starting {who} (DeepSpeed compiles its ops on first use: minutes)")
            try:
                process = stack.enter_context(
                    start_deepspeed(
                        settings.deepspeed_python,
                        directory / who,
                        model,
                        sub_group=model.elements // SUB_GROUPS,
                        buffers=BUFFERS,
                        pipelined=True,
                        op=op,
                        classes=swappers,
                        queue_depth=settings.queue_depth,
                    )
                )
            except ContenderFailed as error:
                absent[who] = str(error)
                continue
            measurements.described[f"{name}, {who}"] = process.described
            contenders[who] = trainer(process, directory, settings.steps)
        turns = take_turns(name, contenders, settings.rounds, progress)
    turns.absent |= absent
    return turns


def trainer(process: WorkerProcess, directory: Path, steps: int) -> Callable[[], Counts]:
    """A contender that trains some steps. It starts from a quiet drive, with nothing of ``directory`` in the page cache."""

    def train() -> Counts:
        quieten(directory)
        return process.call("train", steps=steps)

    return train


def ratio(field: str) -> Callable[[Counts, Counts], float]:
    def of(ours: Counts, theirs: Counts) -> float:
        return float(ours[field] / theirs[field])

    return of


def losses_differ(ours: Counts, theirs: Counts) -> float:
    return float(ours["losses"] != theirs["losses"])


# -- the command line --------------------------------------------------------------------------------------------------


def training_table(title: str, turns: Turns[str, Counts]) -> str:
    rows = []
    for name in CONTENDERS:
        samples = turns.samples.get(name)
        if not samples:
            rows.append([name, "-", "-", "-", "-", turns.absent.get(name, "")])
            continue
        spreads = [Spread.of([sample[field] for sample in samples]) for field in ("seconds", "whole_seconds")]
        peaks = [max(sample[field] for sample in samples) / MIB for field in ("peak", "peak_of_start")]
        texts = [spread_text(spread, 3) for spread in spreads] + [f"{peak:.0f}" for peak in peaks]
        rows.append([name, *texts, turns.absent.get(name, "")])
    header = ["", "s/step, median (quartiles)", "forward and backward too", "peak MiB, training", "until then", ""]
    return table(title, header, rows, left=1)


def as_json(settings: Settings, measurements: Measurements, started: str) -> dict[str, Any]:
    return {
        "benchmark": "deepspeed_training",
        "started": started,
        "machine": machine.described(settings.directory),
        "settings": {**asdict(settings), "directory": None, "deepspeed_python": None},
        "contenders": measurements.described,
        "turns": {name: turns.as_json() for name, turns in measurements.turns.items()},
        "targets": [verdict.as_json() for verdict in measurements.verdicts],
    }


def parse_arguments(arguments: Sequence[str] | None) -> tuple[Settings, Path | None]:
    parser = Parser(__doc__)
    parser.add_deepspeed_python()
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
        "--queue-depth", type=positive, metavar="N", help="of the aio block (default: there is none, so it is DeepSpeed's, 8)"
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
        queue_depth=given.queue_depth,
    )
    return settings, given.json


def main(arguments: Sequence[str] | None = None) -> int:
    settings, json_path = parse_arguments(arguments)
    started = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    with measuring("deepspeed_training"):
        measurements = measure(settings, print_step)
    for title, turns in measurements.turns.items():
        print(training_table(title, turns))
    print(verdict_table(measurements.verdicts))
    write_json(json_path, as_json(settings, measurements, started))
    return 1 if any(turns.absent for turns in measurements.turns.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
