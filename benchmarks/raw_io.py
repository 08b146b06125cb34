"""Tensors to and from the drive: DeepNVMe against fio and DeepSpeed, interleaved within one run.

    python benchmarks/raw_io.py --dir /mnt/nvme --json raw_io.json --deepspeed-python ~/deepspeed/bin/python

Only ratios within one run mean anything: drives, virtual ones above all, drift by a factor of two from hour to hour. So
each round lets every contender move the same bytes once, and a ratio is taken round by round, between neighbours in time.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from harness import drive, fio, footprints, interleave, libraries
from harness.command_line import Parser, Progress, measuring, print_step, write_json
from harness.documents import all_workloads, document
from harness.figures import Verdict
from harness.interleave import Result
from harness.tables import rate_table, size_text, verdict_table
from harness.targets import Target, judge
from harness.workloads import Contender, Memory, Workload

from deepnvme.tools.tune.command_line import positive, size
from deepnvme.tools.tune.folder import check_memory
from deepnvme.tools.tune.job import Operation

MIB = 1 << 20
KIB = 1 << 10
SMALL_DEPTH = 128
MEMORIES: tuple[Memory, ...] = ("pinned", "ordinary", "misaligned")


@dataclass(frozen=True)
class Settings:
    """What to measure, and how large."""

    directory: Path
    deepspeed_python: str | None
    rounds: int
    size: int
    small_files: int
    backend: str
    quick: bool


@dataclass
class Measurements:
    """Everything one run found out."""

    results: list[Result] = field(default_factory=list)
    footprints: list[Verdict] = field(default_factory=list)
    described: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def workloads(size: int, small_files: int) -> list[Workload]:
    """Transfers of ``size`` bytes, and of as many small files, to and from files that are there, preallocated or new."""

    def large(name: str, operation: Operation, state: Literal["existing", "preallocated", "absent"]) -> Workload:
        return Workload(name, operation, state, files=1, nbytes=size, block_size=MIB)

    def small(name: str, operation: Operation) -> Workload:
        return Workload(name, operation, "existing", small_files, nbytes=64 * KIB, block_size=64 * KIB)

    def one_file(name: str, operation: Operation) -> Workload:
        return Workload(name, operation, "existing", files=1, nbytes=64 * KIB, block_size=64 * KIB, tensors=small_files)

    return [
        large("read", "read", "existing"),
        large("overwrite", "write", "existing"),
        large("fresh", "write", "absent"),
        large("preallocated", "write", "preallocated"),
        small("small read", "read"),
        small("small write", "write"),
        one_file("rows read", "read"),
        one_file("rows write", "write"),
    ]


# -- measuring ---------------------------------------------------------------------------------------------------------


def measure(settings: Settings, progress: Progress) -> Measurements:
    """Run everything in a directory of its own below ``settings.directory``, which is empty again afterwards."""
    # Each process holds a pinned, an ordinary and a misaligned tensor; DeepSpeed adds a bounce buffer of the same size.
    tensors = 7 if settings.deepspeed_python else 3
    check_memory(tensors * max(settings.size, settings.small_files * 64 * KIB), "give a smaller --size")
    measurements = Measurements()
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="raw_io-", dir=settings.directory)))
        small_bytes = settings.small_files * 64 * KIB
        drive.check(directory, 2 * settings.size + 2 * small_bytes)
        contenders = list(assemble(settings, directory, stack, measurements, progress))
        for workload in workloads(settings.size, settings.small_files):
            racing = [each for each in contenders if takes_part(each, workload)]
            measurements.results.append(interleave.run(workload, racing, directory, settings.rounds, progress))
        progress("memory beyond the tensors")
        cases = footprints.CASES[-1:] if settings.quick else footprints.CASES
        measurements.footprints.extend(footprints.measure(directory, settings.size, settings.backend, cases))
    return measurements


def takes_part(contender: Contender, workload: Workload) -> bool:
    """Whether this contender has something to say about the workload."""
    if isinstance(contender, fio.FioOnFiles):
        return workload.files > 1
    if isinstance(contender, fio.Fio) and contender.queue_depth != fio.QUEUE_DEPTH:
        return workload.nbytes <= 64 * KIB  # for large transfers more than the default depth makes no difference
    # Handles have no call for many transfers.
    return workload.tensors == 1 or contender.name in ("engine", "fio")


def assemble(
    settings: Settings,
    directory: Path,
    stack: contextlib.ExitStack,
    measurements: Measurements,
    progress: Progress,
) -> Iterator[Contender]:
    """Start whoever can take part, and note why someone cannot."""
    progress("starting DeepNVMe (compiles on first use)")
    ours = stack.enter_context(libraries.LibraryProcess(sys.executable, "deepnvme", directory, settings.backend))
    measurements.described["deepnvme"] = ours.described
    for seed, memory in enumerate(MEMORIES, start=1):
        yield libraries.LibraryContender(ours, "engine", "engine", memory, seed)
        yield libraries.LibraryContender(ours, "handle", "handle", memory, 10 + seed)

    if settings.deepspeed_python is None:
        measurements.notes.append("DeepSpeed left out: give --deepspeed-python")
    else:
        progress("starting DeepSpeed (compiles on first use: minutes)")
        theirs = stack.enter_context(libraries.LibraryProcess(settings.deepspeed_python, "deepspeed", directory, "auto"))
        measurements.described["deepspeed"] = theirs.described
        for seed, memory in enumerate(MEMORIES, start=21):
            yield libraries.LibraryContender(theirs, "deepspeed", "handle", memory, seed)

    program = shutil.which("fio")
    if program is None:
        measurements.notes.append("fio left out: not found; install it with your package manager")
        return
    engine = fio.ioengine(program, directory)
    measurements.described["fio"] = {"version": fio.version(program), "ioengine": engine}
    if engine != "io_uring":
        measurements.notes.append(f"fio runs on {engine}: io_uring is refused here")
    yield fio.Fio(program, engine, "default")
    # What is small is best served with more of it under way; so are ours, by default.
    yield fio.Fio(program, engine, "default", SMALL_DEPTH)
    yield from on_files(program, engine, huge_pages=False)
    try:
        # fio aligns its buffers to a huge page each way. At the greater depth its blocks are 64 KiB.
        stack.enter_context(fio.huge_pages((fio.QUEUE_DEPTH + 8) * MIB, may_reserve=not settings.quick))
    except fio.HugePagesUnavailable as error:
        measurements.notes.append(f"fio with huge pages left out: {error}")
        return
    yield fio.Fio(program, engine, "huge pages")
    yield fio.Fio(program, engine, "huge pages", SMALL_DEPTH)
    yield from on_files(program, engine, huge_pages=True)


def on_files(program: str, engine: str, huge_pages: bool) -> Iterator[Contender]:
    """fio on small files, in all the ways of which the best is compared with."""
    for depth in (fio.QUEUE_DEPTH, SMALL_DEPTH):
        yield fio.FioOnFiles(program, engine, huge_pages, depth, "roundrobin")
        yield fio.FioOnFiles(program, engine, huge_pages, depth, "sequential")


# -- judging -----------------------------------------------------------------------------------------------------------


def targets(settings: Settings) -> list[Target]:
    """The rows that compare. Against fio it is the engine, against DeepSpeed its handle, with defaults on both sides."""
    one, many = size_text(settings.size), f"{settings.small_files} x 64 KiB"
    large = ("read", "overwrite", "fresh")
    engine, handle, deepspeed = (("engine", "pinned"), ("handle", "pinned"), ("deepspeed", "pinned"))
    huge = ("fio", "huge pages")
    found = [Target(f"{one} {name}, pinned: engine / fio with huge pages", name, engine, huge, "rate", 0.98) for name in large]
    found += [
        Target(f"{one} {name}, pinned: handle / DeepSpeed", name, handle, deepspeed, "rate", bound)
        for name, bound in zip(large, (1.25, 1.2, 1.3), strict=True)
    ]
    found += [
        Target(f"{one} {name}: engine, ordinary / pinned", name, ("engine", "ordinary"), engine, "rate", 0.9) for name in large
    ]
    for name, bound in (("read", 0.97), ("write", 0.95)):
        call, best = f"by one {name}_many, pinned: engine / fio's best", ("fio", "best")
        found += [
            Target(f"{many} of one file {call}", f"rows {name}", engine, best, "rate", bound),
            Target(f"{many} files {call} of the same files", f"small {name}", engine, ("fio, same files", "best"), "rate", bound),
            Target(f"{many} files {call} of one file", f"small {name}", engine, best, "rate", bound),
        ]
    for name, bound in (("small read", 3.2), ("small write", 2.5)):
        # Like with like: fio's default buffers are ordinary memory, its huge pages are what ours are pinned in.
        for memory, buffers in (("pinned", "huge pages"), ("ordinary", "default")):
            what = f"{many} {name.removeprefix('small ')}, {memory}: handle"
            found += [
                Target(f"{what} / fio, {buffers} buffers", name, ("handle", memory), ("fio", buffers), "rate", 0.8),
                Target(f"{what} / DeepSpeed", name, ("handle", memory), ("deepspeed", memory), "rate", bound),
            ]
    found += [
        Target(f"CPU s/GB, {one} {name}, pinned: handle / DeepSpeed", name, handle, deepspeed, "cpu", 0.3) for name in large
    ]
    return found


# -- reporting ---------------------------------------------------------------------------------------------------------


def as_json(settings: Settings, measurements: Measurements, verdicts: Sequence[Verdict], started: str) -> dict[str, Any]:
    return document(
        "raw_io",
        started,
        settings,
        verdicts,
        contenders=measurements.described,
        notes=measurements.notes,
        workloads=all_workloads(measurements.results),
    )


# -- the command line --------------------------------------------------------------------------------------------------


def whole_mebibytes(text: str) -> int:
    """Parse the option --size."""
    nbytes = size(text)
    if nbytes % MIB:
        # Else fio's last block would be short, and it is refused where O_DIRECT wants whole sectors.
        raise argparse.ArgumentTypeError(f"must be a multiple of 1 MiB, got {text!r}")
    return nbytes


def parse_arguments(arguments: Sequence[str] | None) -> tuple[Settings, Path | None]:
    parser = Parser(__doc__)
    parser.add_deepspeed_python()
    parser.add_argument("--rounds", type=positive, help="measurements of each contender (default: 7)")
    parser.add_argument("--size", type=whole_mebibytes, help="bytes of the large tensor (default: 1G)")
    parser.add_argument("--backend", default="auto", help="ours: auto, io_uring, libaio or threads (default: auto)")
    parser.add_argument(
        "--quick", action="store_true", help="a trial of the benchmark itself: tiny, and no system setting is touched"
    )
    given = parser.parse(arguments)
    settings = Settings(
        directory=given.dir,
        deepspeed_python=given.deepspeed_python,
        rounds=given.rounds or (2 if given.quick else 7),
        size=given.size or (8 * MIB if given.quick else 1 << 30),
        small_files=50 if given.quick else 4000,
        backend=given.backend,
        quick=given.quick,
    )
    return settings, given.json


def main(arguments: Sequence[str] | None = None) -> int:
    settings, json_path = parse_arguments(arguments)
    with measuring("raw_io") as started:
        measurements = measure(settings, print_step)

    verdicts = [judge(target, measurements.results) for target in targets(settings)] + measurements.footprints
    for result in measurements.results:
        print(rate_table(result))
    print(verdict_table(verdicts))
    for note in measurements.notes:
        print(f"note: {note}")
    write_json(json_path, as_json(settings, measurements, verdicts, started))
    failed = [series for result in measurements.results for series in result.series if series.failure]
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
