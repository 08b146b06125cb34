"""Workloads: each contender rehearses and then carries it out in turn, from the same state of files and drive."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from deepnvme.tools.tune.figures import Spread
from deepnvme.tools.tune.folder import drop_pages, settle
from harness import drive
from harness.command_line import Progress
from harness.comparison import measure_interleaved
from harness.workloads import Contender, ContenderFailed, Sample, Workload

# What files hold before anyone writes them; each contender writes a pattern of its own.
CONTENTS = 0


@dataclass(frozen=True)
class Series:
    """What one contender took, round by round; or, in ``failure``, why it took no part."""

    name: str
    memory: str
    samples: list[Sample]
    failure: str

    def as_json(self) -> dict[str, Any]:
        return {
            "contender": self.name,
            "memory": self.memory,
            "failure": self.failure,
            "gb_per_second": vars(Spread.of([s.gb_per_second for s in self.samples])) if self.samples else None,
            "cpu_seconds_per_gb": vars(Spread.of([s.cpu_seconds_per_gb for s in self.samples])) if self.samples else None,
            "samples": [vars(sample) for sample in self.samples],
        }


@dataclass(frozen=True)
class Result:
    """A workload with the samples of all contenders."""

    workload: Workload
    series: list[Series]

    def find(self, name: str, memory: str) -> Series | None:
        return next((series for series in self.series if (series.name, series.memory) == (name, memory)), None)


def run(workload: Workload, contenders: Sequence[Contender], directory: Path, rounds: int, progress: Progress) -> Result:
    """Measure every contender ``rounds`` times. One that fails is left out from there on, and its series says why."""
    files = {contender: tuple(contender.files(workload, directory)) for contender in contenders}
    if workload.state == "existing":
        progress(f"{workload.name}: laying out files")
        for paths in set(files.values()):
            for index, path in enumerate(paths):
                drive.lay_out(path, workload.total_bytes // len(paths), CONTENTS, index * workload.total_bytes // len(paths))

    failed: dict[Contender, str] = {}
    for contender in contenders:
        progress(f"{workload.name}: rehearsing {contender.name}, {contender.memory}")
        prepare(workload, files[contender], directory)
        try:
            contender.rehearse(workload, files[contender], CONTENTS)
        except ContenderFailed as error:
            failed[contender] = str(error)

    def measure(contender: Contender) -> Sample:
        prepare(workload, files[contender], directory)
        return contender.measure(workload, files[contender])

    racing = {contender: partial(measure, contender) for contender in contenders if contender not in failed}
    comparison = measure_interleaved(workload.name, racing, rounds, progress)
    failed |= comparison.absent

    if workload.state != "existing":
        for paths in files.values():
            for path in paths:
                path.unlink(missing_ok=True)
    return Result(
        workload,
        [Series(each.name, each.memory, comparison.samples.get(each, []), failed.get(each, "")) for each in contenders],
    )


def prepare(workload: Workload, paths: Sequence[Path], directory: Path) -> None:
    """Bring files and drive into the state in which every measurement begins."""
    if workload.state == "absent":
        for path in paths:
            path.unlink(missing_ok=True)
    elif workload.state == "preallocated":
        for path in paths:
            drive.preallocate(path, workload.total_bytes // len(paths))
    drop_pages(paths)
    settle(directory)
