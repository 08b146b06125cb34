"""Replay buffers of torchrl that are larger than memory: ``NVMeStorage`` against ``LazyMemmapStorage``.

    python benchmarks/replay.py --dir /mnt/nvme --json replay.json

Batches of 256 transitions of 28 KB are sampled and extended, in a control group with a fifth of the data as memory. Both buffers
are full, so an extend overwrites. Needs torchrl 0.14.1.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from harness import drive
from harness.command_line import Parser, Progress, measuring, print_step, write_json
from harness.comparison import Comparison, Comparisons, Counts, judge, measure_interleaved
from harness.documents import document
from harness.memory_limit import memory_limit
from harness.tables import spread_text, table, verdict_table
from harness.worker_process import WorkerProcess

from deepnvme.tools.tune.command_line import positive, size
from deepnvme.tools.tune.figures import Spread
from deepnvme.tools.tune.folder import settle

OURS, MAPPED, RANDOM = "deepnvme", "LazyMemmapStorage", "LazyMemmapStorage with MADV_RANDOM"
TARGETS = {"sample": {MAPPED: 50.0, RANDOM: 1.5}, "extend": {MAPPED: 3.0}}
"""How many times as fast as the others ours has to be."""
TRANSITION = 4 * 84 * 84


@dataclass(frozen=True)
class Settings:
    """How much to measure."""

    directory: Path
    size: int
    rounds: int
    seconds: float
    quick: bool


def measure(settings: Settings, progress: Progress) -> Comparisons:
    """Run everything in a directory of its own below ``settings.directory``, which is empty again afterwards."""
    found = Comparisons()
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="replay-", dir=settings.directory)))
        drive.check(directory, settings.size * 5 // 2)
        prefix: Sequence[str] = () if settings.quick else stack.enter_context(memory_limit(settings.size // 5))
        worker = stack.enter_context(WorkerProcess(sys.executable, "harness.replay_worker", [], directory, prefix=prefix))
        progress("filling the buffers")
        worker.call("fill", directory=str(directory), count=settings.size // TRANSITION)

        def run(what: str, contender: str) -> Counts:
            settle(directory)
            return worker.call("run", what=what, contender=contender, seconds=settings.seconds)

        for what, bounds in TARGETS.items():
            racing = {contender: partial(run, what, contender) for contender in (OURS, *bounds)}
            comparison = found.comparisons[what] = measure_interleaved(what, racing, settings.rounds, progress)
            for other, bound in bounds.items():
                text = f"{what}: transitions a second, ours / {other}"
                found.verdicts.append(judge(comparison, text, (OURS, other), _times_as_many, "at least", bound))
    return found


def _times_as_many(ours: Counts, theirs: Counts) -> float:
    return float(ours["rate"]) / float(theirs["rate"])


def as_table(what: str, comparison: Comparison[str, Counts]) -> str:
    rows = []
    for name, samples in comparison.samples.items():
        rates = Spread.of([sample["rate"] for sample in samples])
        cpu = Spread.of([1e6 * sample["cpu_seconds"] / sample["samples"] for sample in samples])
        rows.append([name, spread_text(rates, 0), spread_text(cpu)])
    return table(f"{what}, batches of 256", ["contender", "transitions/s, median (quartiles)", "CPU us each"], rows, left=1)


def parse_arguments(arguments: Sequence[str] | None) -> tuple[Settings, Path | None]:
    parser = Parser(__doc__)
    parser.add_argument("--rounds", type=positive, help="measurements of each contender (default: 3)")
    parser.add_argument("--size", type=size, help="bytes of a buffer (default: 15G)")
    parser.add_argument("--seconds", type=positive, help="how long each runs in a round (default: 5)")
    parser.add_argument("--quick", action="store_true", help="a trial of the benchmark itself: tiny, without a control group")
    given = parser.parse(arguments)
    settings = Settings(
        directory=given.dir,
        size=given.size or (60 << 20 if given.quick else 15 << 30),
        rounds=given.rounds or (1 if given.quick else 3),
        seconds=given.seconds or (0.2 if given.quick else 5),
        quick=given.quick,
    )
    return settings, given.json


def main(arguments: Sequence[str] | None = None) -> int:
    settings, json_path = parse_arguments(arguments)
    with measuring("replay") as started:
        found = measure(settings, print_step)
    for what, comparison in found.comparisons.items():
        print(as_table(what, comparison))
    print(verdict_table(found.verdicts))
    figures = {what: comparison.as_json() for what, comparison in found.comparisons.items()}
    write_json(json_path, document("replay", started, settings, found.verdicts, comparisons=figures))
    return 1 if any(each.absent for each in found.comparisons.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
