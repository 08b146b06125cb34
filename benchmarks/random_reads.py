"""Random reads of 4 KiB from one file: ``Engine.gather``, called by one Python thread, against fio.

    python benchmarks/random_reads.py --dir /mnt/nvme --json random_reads.json

fio runs on io_uring with every combination of depth and number of jobs; the one with the highest median is compared with ours.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from harness import drive, fio
from harness.command_line import Parser, Progress, measuring, print_step, write_json
from harness.comparison import Comparison, Counts, judge, measure_interleaved
from harness.documents import document
from harness.figures import Verdict
from harness.random_read_worker import RECORD
from harness.tables import spread_text, table, verdict_table
from harness.worker_process import WorkerProcess

from deepnvme.tools.tune.command_line import positive, size
from deepnvme.tools.tune.figures import Spread
from deepnvme.tools.tune.folder import check_memory, drop_pages, settle

MIB = 1 << 20
OURS = "gather"
# Which engines gather. Only the defaults are judged; the others show what settings would change.
ENGINES: dict[str, dict[str, int]] = {
    OURS: {},
    "gather, depth 64": {"queue_depth": 64},
    "gather, depth 256": {"queue_depth": 256},
    "gather, 2 workers": {"num_threads": 2},
}
DEPTHS = (16, 32, 64, 128, 256)
JOBS = (1, 2)


@dataclass(frozen=True)
class Settings:
    """How much to measure."""

    directory: Path
    size: int
    rounds: int
    seconds: float
    batch: int
    in_flight: int
    quick: bool


@dataclass
class Measurements:
    """Everything one run found out."""

    comparison: Comparison[str, Counts] = field(default_factory=Comparison)
    described: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def measure(settings: Settings, progress: Progress) -> Measurements:
    """Run everything in a directory of its own below ``settings.directory``, which is empty again afterwards."""
    check_memory(settings.in_flight * settings.batch * RECORD, "give a smaller --batch")
    measurements = Measurements()
    with tempfile.TemporaryDirectory(prefix="random_reads-", dir=settings.directory) as name:
        directory = Path(name)
        drive.check(directory, settings.size)
        path = directory / "records"
        progress("laying out the file")
        drive.lay_out(path, settings.size, seed=0)
        progress("starting DeepNVMe (compiles on first use)")
        with WorkerProcess(sys.executable, "harness.random_read_worker", [], directory) as ours:
            measurements.described["deepnvme"] = ours.described
            drop_pages([path])
            ours.call("check", path=str(path), count=1024, seed=0)
            engines = dict(list(ENGINES.items())[:1]) if settings.quick else ENGINES
            gathering = {
                name: partial(
                    ours.call,
                    "gather",
                    path=str(path),
                    seconds=settings.seconds,
                    batch=settings.batch,
                    in_flight=settings.in_flight,
                    options=options,
                )
                for name, options in engines.items()
            }
            reading = {each.name: partial(each.measure, settings.seconds) for each in jobs_of_fio(settings, path, measurements)}

            def prepared(read: partial[Counts]) -> Counts:
                drop_pages([path])
                settle(directory)
                return read()

            racing = {name: partial(prepared, read) for name, read in (gathering | reading).items()}
            measurements.comparison = measure_interleaved("random reads", racing, settings.rounds, progress)
    return measurements


def jobs_of_fio(settings: Settings, path: Path, measurements: Measurements) -> list[fio.RandomReads]:
    """Every combination; none where there is no fio."""
    program = shutil.which("fio")
    if program is None:
        measurements.notes.append("fio left out: not found; install it with your package manager")
        return []
    engine = fio.ioengine(program, path.parent)
    measurements.described["fio"] = {"version": fio.version(program), "ioengine": engine}
    if engine != "io_uring":
        measurements.notes.append(f"fio runs on {engine}: io_uring is refused here")
    depths = DEPTHS[1:2] if settings.quick else DEPTHS
    return [fio.RandomReads(program, engine, path, depth, jobs) for depth in depths for jobs in JOBS]


def verdicts(comparison: Comparison[str, Counts]) -> list[Verdict]:
    medians = {name: Spread.of(list(map(rate, each))).median for name, each in comparison.samples.items() if each}
    best = max((name for name in medians if name.startswith("fio")), key=lambda name: medians[name], default="fio")
    return [
        judge(comparison, "4 KiB random reads: gather / fio's best", (OURS, best), times_as_many, "at least", 0.95),
        judge(comparison, "CPU cores that gather keeps busy", (OURS,), cores, "at most", 1.0),
        judge(comparison, "CPU time a read, all threads: gather / fio's best", (OURS, best), times_the_cpu, "at most", 1.3),
    ]


def rate(sample: Counts) -> float:
    """Reads per second."""
    per_second: float = sample["reads"] / sample["seconds"]
    return per_second


def cores(sample: Counts) -> float:
    busy: float = sample["cpu_seconds"] / sample["seconds"]
    return busy


def cpu_a_read(sample: Counts) -> float:
    """Microseconds."""
    return 1e6 * cores(sample) / rate(sample)


def times_as_many(ours: Counts, theirs: Counts) -> float:
    return rate(ours) / rate(theirs)


def times_the_cpu(ours: Counts, theirs: Counts) -> float:
    # The short runs of a trial may take less time than the kernel charges.
    return cpu_a_read(ours) / max(cpu_a_read(theirs), 1e-3)


def as_table(comparison: Comparison[str, Counts]) -> str:
    """Rates and CPU time of each contender."""
    rows = []
    for name, samples in comparison.samples.items():
        if name in comparison.absent:
            rows.append([name, "-", "-", "-", f"failed: {comparison.absent[name]}"])
            continue
        figures = [Spread.of([figure(sample) for sample in samples]) for figure in (rate, cpu_a_read, cores)]
        rows.append([name, spread_text(figures[0], 0), spread_text(figures[1]), f"{figures[2].median:.2f}", ""])
    header = ["contender", "reads/s, median (quartiles)", "CPU us a read", "cores", ""]
    return table("4 KiB random reads of one file", header, rows, left=1)


def whole_records(text: str) -> int:
    """Parse the option --size."""
    nbytes = size(text)
    if nbytes % MIB:
        raise argparse.ArgumentTypeError(f"must be a multiple of 1 MiB, got {text!r}")
    return nbytes


def parse_arguments(arguments: Sequence[str] | None) -> tuple[Settings, Path | None]:
    parser = Parser(__doc__)
    parser.add_argument("--rounds", type=positive, help="measurements of each contender (default: 7)")
    parser.add_argument("--size", type=whole_records, help="bytes of the file (default: 4G)")
    parser.add_argument("--seconds", type=positive, help="how long each reads in a round (default: 2)")
    parser.add_argument("--batch", type=positive, help="records of one gather (default: 8192)")
    parser.add_argument("--in-flight", type=positive, default=4, help="gathers under way at a time (default: 4)")
    parser.add_argument("--quick", action="store_true", help="a trial of the benchmark itself: tiny")
    given = parser.parse(arguments)
    settings = Settings(
        directory=given.dir,
        size=given.size or (16 * MIB if given.quick else 4 << 30),
        rounds=given.rounds or (2 if given.quick else 7),
        seconds=given.seconds or (0.1 if given.quick else 2),
        batch=given.batch or (256 if given.quick else 8192),
        in_flight=given.in_flight,
        quick=given.quick,
    )
    return settings, given.json


def main(arguments: Sequence[str] | None = None) -> int:
    settings, json_path = parse_arguments(arguments)
    with measuring("random_reads") as started:
        measurements = measure(settings, print_step)
    judged = verdicts(measurements.comparison)
    print(as_table(measurements.comparison))
    print(verdict_table(judged))
    for note in measurements.notes:
        print(f"note: {note}")
    write_json(
        json_path,
        document(
            "random_reads",
            started,
            settings,
            judged,
            contenders=measurements.described,
            notes=measurements.notes,
            comparison=measurements.comparison.as_json(),
        ),
    )
    return 1 if measurements.comparison.absent else 0


if __name__ == "__main__":
    sys.exit(main())
