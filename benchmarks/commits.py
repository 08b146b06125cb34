"""Two commits of this package in turn: whether a change made raw I/O, optimizer steps, checkpoints or streaming slower.

    python benchmarks/commits.py --before main~20 --dir /mnt/nvme --json commits.json
    python benchmarks/commits.py --before HEAD --after dist/deepnvme-0.1.0-cp311-cp311-manylinux_2_28_x86_64.whl --dir /mnt/nvme

Each workload runs in a process of either commit, turn by turn. What varies from process to process (where memory happens to lie)
is not averaged away by more turns, so there are several such pairs. Peak memory is that of further processes, in which the C
library returns freed memory at once.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness import drive
from harness.command_line import Parser, Progress, measuring, print_step, write_json
from harness.comparison import Comparison, Comparisons, Counts, judge, measure_interleaved, times_as_fast
from harness.documents import all_comparisons, document
from harness.optimizer_steps import quieten
from harness.tables import comparison_table, verdict_table
from harness.wheels import unpack_wheel
from harness.worker_process import WorkerProcess, importing_from
from harness.workloads import ContenderFailed

import deepnvme
from deepnvme.tools.tune.command_line import positive

SPEED, MEMORY = 0.97, 1.02
WORKLOADS = {
    "raw": "raw I/O, write and read",
    "step": "optimizer step, bfloat16 and master weights",
    "fp32_step": "optimizer step, float32",
    "fp32_step_in_little_memory": "optimizer step, float32, buffer pool for three sub-groups",
    "training": "training step, everything on the drive",
    "swappers": "DeepSpeed's swapper classes",
    "save": "save",
    "load": "load",
    "forward": "streamed forward",
    "half_resident": "streamed forward, half of the weights resident",
    "kv": "generation with keys and values on the drive",
    "rows": "random rows of a table",
    "bag": "EmbeddingBag step, rows on the drive",
}
NO_HEAP = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
"""Variables for glibc: memory that it keeps in its heap made one commit's peaks differ by 9 % (kv: 614 to 668 MiB), now 1 %."""
BENCHMARKS = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Settings:
    """The two commits, and how much to measure."""

    directory: Path
    before: str
    after: str | None
    rounds: int
    pairs: int
    scale: float
    only: tuple[str, ...]


@dataclass
class Measurements(Comparisons):
    """Everything one run found out."""

    peaks: dict[str, Comparison[str, Counts]] = field(default_factory=dict)
    """Of memory: a sample for each pair of processes."""


def measure(settings: Settings, progress: Progress) -> Measurements:
    """Run all workloads in a directory below ``settings.directory``, which is removed afterwards."""
    drive.check(settings.directory, int(settings.scale * (6 << 30)))
    measurements = Measurements()
    with tempfile.TemporaryDirectory(prefix="commits-", dir=settings.directory) as made:
        directory = Path(made)
        packages = {"before": check_out(settings.before, directory / "before")}
        installed = Path(deepnvme.__file__).parents[1]
        packages["after"] = check_out(settings.after, directory / "after") if settings.after else installed
        for workload in settings.only:
            compare(workload, settings, packages, directory, measurements, progress)
    for workload in settings.only:
        what, comparison, peaks = WORKLOADS[workload], measurements.comparisons[workload], measurements.peaks[workload]
        who = ("after", "before")
        measurements.verdicts += [
            judge(comparison, f"{what}: times as fast", who, times_as_fast, "at least", SPEED),
            judge(peaks, f"{what}: peak memory", who, times_the_memory, "at most", MEMORY),
        ]
    return measurements


def check_out(commit: str, directory: Path) -> Path:
    """The files of a commit of the repository that this benchmark lies in, or of a wheel."""
    directory.mkdir()
    if commit.endswith(".whl"):
        unpack_wheel(Path(commit), directory)
        return directory
    archive = subprocess.run(["git", "archive", commit], cwd=BENCHMARKS.parent, capture_output=True)
    if archive.returncode:
        raise ContenderFailed(f"git has no commit '{commit}': {archive.stderr.decode().strip()}")
    subprocess.run(["tar", "-x"], cwd=directory, input=archive.stdout, check=True)
    return directory


def compare(
    workload: str, settings: Settings, packages: dict[str, Path], directory: Path, measurements: Measurements, progress: Progress
) -> None:
    """Several pairs of processes, one of each commit, take turns with one workload; others then tell its peak memory."""
    comparison = measurements.comparisons[workload] = Comparison({who: [] for who in packages})
    peaks = measurements.peaks[workload] = Comparison({who: [] for who in packages})
    for pair in range(settings.pairs):
        title = f"{workload}, pair {pair + 1} of {settings.pairs}"
        with tempfile.TemporaryDirectory(dir=directory) as made, contextlib.ExitStack() as stack:
            try:
                processes = {
                    who: stack.enter_context(start(workload, package, Path(made), who, settings.scale))
                    # Whoever starts first may find other memory.
                    for who, package in (packages if pair % 2 == 0 else dict(reversed(packages.items()))).items()
                }
            except ContenderFailed as error:
                comparison.absent |= dict.fromkeys(packages, str(error))
                peaks.absent |= comparison.absent
                return
            runs = {who: turn_of(processes[who], Path(made)) for who in packages}
            of_pair = measure_interleaved(title, runs, settings.rounds, progress)
            for who in processes:
                comparison.samples[who] += of_pair.samples[who]
            comparison.absent |= of_pair.absent
        for who, package in packages.items():
            with (
                tempfile.TemporaryDirectory(dir=directory) as made,
                start(workload, package, Path(made), who, settings.scale, NO_HEAP) as process,
            ):
                process.call("turn")
                peaks.samples[who].append(process.call("peak"))


def start(
    workload: str, package: Path, directory: Path, who: str, scale: float, variables: Mapping[str, str] | None = None
) -> WorkerProcess:
    """A process that runs the workload with the package of one commit. Raises ContenderFailed if it imports another."""
    (directory / who).mkdir()
    settings = {"workload": workload, "directory": str(directory / who), "scale": scale}
    arguments = [json.dumps(settings)]
    process = WorkerProcess(
        sys.executable, "harness.commit_worker", arguments, directory, importing_from(package) | (variables or {})
    )
    if Path(process.described["package"]).parent != package:
        process.close()
        raise ContenderFailed(f"'{who}' imported '{process.described['package']}', not that of '{package}'")
    return process


def turn_of(process: WorkerProcess, directory: Path) -> Callable[[], Counts]:
    def turn() -> Counts:
        quieten(directory)
        return process.call("turn")

    return turn


def times_the_memory(ours: Counts, theirs: Counts) -> float:
    ratio: float = ours["peak"] / theirs["peak"]
    return ratio


# -- the command line --------------------------------------------------------------------------------------------------


def as_json(settings: Settings, measurements: Measurements, started: str) -> dict[str, Any]:
    figures = {"comparisons": all_comparisons(measurements.comparisons), "peaks": all_comparisons(measurements.peaks)}
    return document("commits", started, settings, measurements.verdicts, **figures)


def parse_arguments(arguments: Sequence[str] | None) -> tuple[Settings, Path | None]:
    parser = Parser(__doc__)
    parser.add_argument("--before", required=True, metavar="COMMIT", help="what to compare with: as git names it, or a wheel")
    parser.add_argument("--after", metavar="COMMIT", help="likewise (default: the package that is installed here)")
    parser.add_argument("--only", choices=tuple(WORKLOADS), action="append", help="a workload; can be given more than once")
    parser.add_argument("--rounds", type=positive, help="turns of each process (default: 5)")
    parser.add_argument("--pairs", type=positive, help="pairs of processes for each workload (default: 3)")
    parser.add_argument("--quick", action="store_true", help="a trial of the benchmark itself: tiny")
    given = parser.parse(arguments)
    settings = Settings(
        directory=given.dir,
        before=given.before,
        after=given.after,
        rounds=given.rounds or (1 if given.quick else 5),
        pairs=given.pairs or (1 if given.quick else 3),
        scale=0.02 if given.quick else 1,
        only=tuple(given.only or WORKLOADS),
    )
    return settings, given.json


def main(arguments: Sequence[str] | None = None) -> int:
    settings, json_path = parse_arguments(arguments)
    with measuring("commits") as started:
        measurements = measure(settings, print_step)
    for name, comparison in measurements.comparisons.items():
        print(comparison_table(WORKLOADS[name], comparison))
    print(verdict_table(measurements.verdicts))
    write_json(json_path, as_json(settings, measurements, started))
    return 0


if __name__ == "__main__":
    sys.exit(main())
