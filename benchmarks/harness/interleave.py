"""Contenders measured in turns, A B C, C B A, A B C: neighbours in time meet the same drive."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deepnvme.tune.figures import Spread
from deepnvme.tune.folder import drop_pages, settle
from harness import drive
from harness.workloads import Contender, ContenderFailed, Sample, Workload

# What files hold before anyone writes them; each contender writes a pattern of its own.
CONTENTS = 0


@dataclass
class Series:
    """What one contender took, round by round; or, in ``failure``, why it took no part."""

    name: str
    memory: str
    samples: list[Sample] = field(default_factory=list)
    failure: str = ""

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
    workload: Workload
    series: list[Series]

    def find(self, name: str, memory: str) -> Series | None:
        return next((series for series in self.series if (series.name, series.memory) == (name, memory)), None)


def run(
    workload: Workload,
    contenders: Sequence[Contender],
    directory: Path,
    rounds: int,
    progress: Callable[[str], None],
) -> Result:
    """Measure every contender ``rounds`` times. One that fails is left out from there on, and its series says why."""
    files = {contender: tuple(contender.files(workload, directory)) for contender in contenders}
    if workload.state == "existing":
        progress(f"{workload.name}: laying out files")
        for paths in set(files.values()):
            for index, path in enumerate(paths):
                drive.lay_out(path, workload.total_bytes // len(paths), CONTENTS, index * workload.nbytes)

    racing: list[tuple[Contender, Series]] = []
    result = Result(workload, [])
    for contender in contenders:
        progress(f"{workload.name}: rehearsing {contender.name}, {contender.memory}")
        series = Series(contender.name, contender.memory)
        result.series.append(series)
        prepare(workload, files[contender], directory)
        try:
            contender.rehearse(workload, files[contender], CONTENTS)
        except ContenderFailed as error:
            series.failure = str(error)
        else:
            racing.append((contender, series))

    for turn in range(rounds):
        progress(f"{workload.name}: round {turn + 1} of {rounds}")
        # Back and forth, so that nobody always follows the same predecessor and a steady drift cancels.
        for contender, series in racing if turn % 2 == 0 else reversed(racing):
            if series.failure:
                continue
            prepare(workload, files[contender], directory)
            try:
                series.samples.append(contender.measure(workload, files[contender]))
            except ContenderFailed as error:
                series.failure = str(error)

    if workload.state != "existing":
        for paths in files.values():
            for path in paths:
                path.unlink(missing_ok=True)
    return result


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
