"""The op of a wheel against the one compiled here: every transfer of raw_io.py, in several pairs of processes.

    python benchmarks/prebuilt_op.py --wheel dist/deepnvme-0.1.0-cp311-cp311-manylinux_2_28_x86_64.whl --dir /mnt/nvme

Both run in this interpreter, with the same torch. What varies from process to process (where memory happens to lie) is not
averaged away by more rounds, and can be more than the 2 % that are looked for. So there are several pairs of processes, the two
of a pair take turns, and the figure of a row is the median over the rounds of all pairs.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness import drive, interleave
from harness.command_line import Parser, Progress, measuring, print_step, write_json
from harness.documents import all_workloads, document
from harness.figures import Verdict
from harness.interleave import Result, Series
from harness.libraries import LibraryContender, LibraryProcess
from harness.tables import rate_table, verdict_table
from harness.targets import Target, judge
from harness.wheels import unpack_wheel
from harness.workloads import ContenderFailed, Workload
from raw_io import MEMORIES, MIB, whole_mebibytes, workloads

from deepnvme.tools.tune.command_line import positive
from deepnvme.tools.tune.folder import check_memory

SPEED = 0.98
WHEEL, HERE = "wheel", "compiled here"


@dataclass(frozen=True)
class Settings:
    """The wheel, and how much to measure."""

    directory: Path
    wheel: Path
    pairs: int
    rounds: int
    size: int
    small_files: int
    backend: str
    only: tuple[str, ...]

    @property
    def workloads(self) -> list[Workload]:
        return [each for each in workloads(self.size, self.small_files) if each.name in self.only]


@dataclass
class Measurements:
    """Everything one run found out."""

    results: list[Result] = field(default_factory=list)
    described: dict[str, Any] = field(default_factory=dict)


def measure(settings: Settings, progress: Progress) -> Measurements:
    """Run everything in a directory of its own below ``settings.directory``, which is removed afterwards."""
    small_bytes = settings.small_files * (64 << 10)
    check_memory(2 * len(MEMORIES) * max(settings.size, small_bytes), "give a smaller --size")
    drive.check(settings.directory, 2 * settings.size + 2 * small_bytes)
    measurements = Measurements()
    with tempfile.TemporaryDirectory(prefix="prebuilt_op-", dir=settings.directory) as made:
        directory, unpacked = Path(made, "files"), Path(made, "wheel")
        directory.mkdir()
        unpack_wheel(settings.wheel, unpacked)
        if not has_op(unpacked):
            raise ContenderFailed(f"'{settings.wheel}' has no op for this interpreter")
        for pair in range(settings.pairs):
            progress(f"pair {pair + 1} of {settings.pairs}")
            of_pair = measure_pair(settings, directory, unpacked, pair % 2 == 1, measurements.described, progress)
            measurements.results = (
                [joined(*both) for both in zip(measurements.results, of_pair, strict=True)] if measurements.results else of_pair
            )
    return measurements


def has_op(unpacked: Path) -> bool:
    """Whether the package there has an op for this interpreter. Where it has none, it would compile one."""
    program = "from deepnvme.ops.op_builder import AsyncIOBuilder as Builder; print(Builder().is_prebuilt().ok)"
    environment = {**os.environ, "PYTHONPATH": str(unpacked)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, cwd=unpacked, capture_output=True, text=True)
    return done.stdout.strip() == "True"


def measure_pair(
    settings: Settings, directory: Path, unpacked: Path, swapped: bool, described: dict[str, Any], progress: Progress
) -> list[Result]:
    """Measure all workloads, each op in a process of its own. The wheel's starts first, or second if ``swapped``, since whoever
    starts first may find other memory."""

    def start(name: str) -> LibraryProcess:
        folder = unpacked if name == WHEEL else None
        return LibraryProcess(sys.executable, "deepnvme", directory, settings.backend, folder)

    first, second = (HERE, WHEEL) if swapped else (WHEEL, HERE)
    with start(first) as one, start(second) as other:
        processes = {first: one, second: other}
        described |= {name: process.described for name, process in processes.items()}
        contenders = [
            LibraryContender(process, name, "engine", memory, seed)
            for seed, (memory, (name, process)) in enumerate(itertools.product(MEMORIES, processes.items()), start=1)
        ]
        return [interleave.run(each, contenders, directory, settings.rounds, progress) for each in settings.workloads]


def joined(earlier: Result, later: Result) -> Result:
    """The result with the samples of both."""
    series = []
    for before in earlier.series:
        after = later.find(before.name, before.memory)
        assert after is not None
        series.append(Series(before.name, before.memory, before.samples + after.samples, before.failure or after.failure))
    return Result(earlier.workload, series)


def targets(settings: Settings) -> list[Target]:
    return [
        Target(f"{workload.name}, {memory}: wheel / compiled here", workload.name, (WHEEL, memory), (HERE, memory), "rate", SPEED)
        for workload in settings.workloads
        for memory in MEMORIES
    ]


# -- the command line --------------------------------------------------------------------------------------------------


def as_json(settings: Settings, measurements: Measurements, verdicts: Sequence[Verdict], started: str) -> dict[str, Any]:
    figures = {"contenders": measurements.described, "workloads": all_workloads(measurements.results)}
    return document("prebuilt_op", started, settings, verdicts, wheel=settings.wheel.name, **figures)


def parse_arguments(arguments: Sequence[str] | None) -> tuple[Settings, Path | None]:
    parser = Parser(__doc__)
    parser.add_argument("--wheel", type=Path, required=True, metavar="FILE", help="a wheel of this package for this interpreter")
    parser.add_argument("--pairs", type=positive, help="pairs of processes (default: 6)")
    parser.add_argument("--rounds", type=positive, help="measurements of each process (default: 8)")
    parser.add_argument("--size", type=whole_mebibytes, help="bytes of the large tensor (default: 512M)")
    parser.add_argument("--backend", default="auto", help="auto, io_uring, libaio or threads (default: auto)")
    names = tuple(workload.name for workload in workloads(MIB, 1))
    parser.add_argument("--only", choices=names, action="append", help="a transfer; can be given more than once")
    parser.add_argument("--quick", action="store_true", help="a trial of the benchmark itself: tiny")
    given = parser.parse(arguments)
    settings = Settings(
        directory=given.dir,
        wheel=given.wheel.resolve(),
        pairs=given.pairs or (2 if given.quick else 6),
        rounds=given.rounds or (1 if given.quick else 8),
        size=given.size or (8 * MIB if given.quick else 512 * MIB),
        small_files=50 if given.quick else 4000,
        backend=given.backend,
        only=tuple(given.only or names),
    )
    return settings, given.json


def main(arguments: Sequence[str] | None = None) -> int:
    settings, json_path = parse_arguments(arguments)
    with measuring("prebuilt_op") as started:
        measurements = measure(settings, print_step)

    verdicts = [judge(target, measurements.results) for target in targets(settings)]
    for result in measurements.results:
        print(rate_table(result))
    print(verdict_table(verdicts))
    write_json(json_path, as_json(settings, measurements, verdicts, started))
    return 1 if any(series.failure for result in measurements.results for series in result.series) else 0


if __name__ == "__main__":
    sys.exit(main())
