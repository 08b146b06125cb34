"""How long a checkpoint of 1 GB holds a training of Lightning and of transformers' Trainer, against what these do by themselves.

    python benchmarks/trainer_checkpoints.py --dir /mnt/nvme --json trainer_checkpoints.json

Every contender trains the same Llama for three steps, with a checkpoint after each, in a process of its own. The first save also
pins memory; the others count. A save is timed from the end of the step to the return of the trainer's save; then the benchmark
waits until the checkpoint is there, the page cache is written back and the drive is idle. fsync is in no contender's time; only
ours call it. Then small trainings that save after every step are killed by SIGKILL and resumed: each checkpoint that is there
must be whole, and there must be one. Needs lightning, transformers, accelerate and safetensors.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from harness import drive
from harness.command_line import Parser, Progress, measuring, print_step, write_json
from harness.comparison import Comparison, Comparisons, Counts, judge, measure_interleaved, times_as_fast
from harness.documents import all_comparisons, document
from harness.figures import Verdict
from harness.saving_trainings import STEPS
from harness.tables import spread_text, table, verdict_table
from harness.trainer_kills import kills
from harness.worker_process import WorkerProcess

from deepnvme.tools.tune.command_line import positive
from deepnvme.tools.tune.figures import Spread

CONTENDERS = {
    "Lightning": ("default", "AsyncCheckpointIO", "NVMeCheckpointIO"),
    "Trainer": ("default", "async_checkpoints"),
}
"""Of each framework. The last is ours."""


@dataclass(frozen=True)
class Settings:
    """What to measure, and how large."""

    directory: Path
    rounds: int
    gb: float
    kills: int
    only: tuple[str, ...]


@dataclass
class Measurements(Comparisons):
    """What one run found out."""

    kills: dict[str, dict[str, int]] = field(default_factory=dict)
    """What kills left, by contender."""


def measure_saves(settings: Settings, measurements: Measurements, progress: Progress) -> None:
    """Measure how long saves hold trainings."""
    drive.check(settings.directory, round(settings.gb * 1e9) * (STEPS + 1))
    for framework, names in CONTENDERS.items():
        contenders = {name: partial(train, framework, name, settings) for name in names}
        comparison = measure_interleaved(framework, contenders, settings.rounds, progress)
        measurements.comparisons[framework] = comparison
        what = f"{framework}: time that a save holds the training, {names[-1]} / default"
        verdict = judge(comparison, what, (names[0], names[-1]), times_as_fast, "at most", 0.25)
        measurements.verdicts.append(verdict)


def train(framework: str, name: str, settings: Settings) -> Counts:
    """Train with a contender in a process of its own."""
    with tempfile.TemporaryDirectory(prefix="trainer_checkpoints-", dir=settings.directory) as made:
        given = {"framework": framework, "name": name, "directory": made, "gb": settings.gb}
        with WorkerProcess(sys.executable, "harness.saving_trainings", [json.dumps(given)], Path(made)) as process:
            return process.call("train")


def count_kills(settings: Settings, measurements: Measurements, progress: Progress) -> None:
    """Kill trainings, of the defaults a tenth as many."""
    for framework, names in CONTENDERS.items():
        for name, count in ((names[-1], settings.kills), (names[0], -(-settings.kills // 10))):
            progress(f"{framework}, {name}: {count} kills")
            with tempfile.TemporaryDirectory(prefix="trainer_checkpoints-", dir=settings.directory) as made:
                measurements.kills[f"{framework}, {name}"] = found = kills(framework, name, Path(made), count)
            if name == names[-1]:
                what = f"{framework}, {name}: no checkpoint or a broken one, of {count} kills"
                measurements.verdicts.append(Verdict(what, Spread.of([found["not_whole"]]), "at most", 0))


PARTS: dict[str, Callable[[Settings, Measurements, Progress], None]] = {"saves": measure_saves, "kills": count_kills}


def measure(settings: Settings, progress: Progress) -> Measurements:
    """Run the parts in directories below ``settings.directory``, which are removed afterwards."""
    measurements = Measurements()
    for part in settings.only:
        PARTS[part](settings, measurements, progress)
    return measurements


# -- reporting -----------------------------------------------------------------------------------------------------------


def rows(comparison: Comparison[str, Counts]) -> Iterator[list[str]]:
    """Seconds of every contender; why one took no part."""
    for name, samples in comparison.samples.items():
        columns = [[sample[key] for sample in samples] for key in ("seconds", "first_seconds")]
        spreads = [spread_text(Spread.of(column), 3) if column else "-" for column in columns]
        nbytes = f"{samples[-1]['bytes'] / 1e9:.2f}" if samples else "-"
        yield [name, *spreads, nbytes, comparison.absent.get(name, "")]


def report(measurements: Measurements) -> str:
    header = ["contender", "s held, median (quartiles)", "s held by the first save", "GB", ""]
    tables = [table(f"Saves of {framework}", header, rows(each), left=1) for framework, each in measurements.comparisons.items()]
    if measurements.kills:
        of_kills = [
            [name, str(found["kills"]), str(found["during_save"]), str(found["not_whole"])]
            for name, found in measurements.kills.items()
        ]
        tables.append(table("Kills", ["contender", "kills", "seen during a save", "none or a broken one left"], of_kills, left=1))
    return "\n".join([*tables, verdict_table(measurements.verdicts)])


def as_json(settings: Settings, measurements: Measurements, started: str) -> dict[str, Any]:
    return document(
        "trainer_checkpoints", started, settings, measurements.verdicts,
        comparisons=all_comparisons(measurements.comparisons), kills=measurements.kills,
    )  # fmt: skip


# -- the command line ----------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(__doc__)
    parser.add_argument("--only", choices=tuple(PARTS), action="append", help="a part; can be given more than once")
    parser.add_argument("--rounds", type=positive, default=3, help="trainings of each contender (default: 3)")
    parser.add_argument("--gb", type=float, default=1, help="size of a checkpoint (default: 1)")
    parser.add_argument("--kills", type=positive, default=200, help="of each of ours, and a tenth of each default (default: 200)")
    given = parser.parse(arguments)
    settings = Settings(given.dir, given.rounds, given.gb, given.kills, tuple(given.only or PARTS))
    with measuring("trainer_checkpoints") as started:
        measurements = measure(settings, print_step)
    print(report(measurements))
    write_json(given.json, as_json(settings, measurements, started))
    return 0


if __name__ == "__main__":
    sys.exit(main())
