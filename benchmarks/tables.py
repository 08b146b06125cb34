"""Rows of tables on the drive: against fio, other readers, a table in memory, and training on mapped files.

    python benchmarks/tables.py --dir /mnt/nvme --json tables.json

Of the other libraries, those take part that are installed: pip install datasets pylance.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from harness import drive, fio
from harness.command_line import Parser, Progress, measuring, print_step, write_json
from harness.comparison import Comparison, Comparisons, Counts, judge, measure_interleaved, times_as_fast
from harness.documents import all_comparisons, document
from harness.figures import Verdict
from harness.memory_limit import memory_limit
from harness.table_kills import kills
from harness.table_worker import CELL
from harness.tables import spread_text, table, verdict_table
from harness.worker_process import WorkerProcess
from harness.workloads import ContenderFailed

from deepnvme.memory.host import empty_aligned
from deepnvme.memory.system_memory import available_memory
from deepnvme.tools.tune.command_line import positive
from deepnvme.tools.tune.figures import Spread
from deepnvme.tools.tune.folder import check_memory, drop_pages, settle

MIB = 1 << 20
GIB = 1 << 30
BATCH = 8192
PARTS = ("uniform", "others", "zipf", "bag", "collection", "memory", "kills")
ROW_BYTES = (512, 1024, 4096)
FIO = ((64, 1), (128, 1), (256, 1), (64, 2), (128, 2))
"""Depth and number of jobs."""
OURS = ("table", "table, overlapping")
OTHERS = {"numpy.memmap": 5.0, "torch.from_file": 5.0, "os.preadv": 1.5, "datasets": 5.0, "lance": 2.0}
"""How many times as fast ours is to be."""
OWN_FORMAT = ("datasets", "lance")
EXPONENT = 1.05
BEYOND_BUDGET = 64 * MIB


@dataclass(frozen=True)
class Settings:
    """How much to measure."""

    directory: Path
    nbytes: int
    """Of the table that is read uniformly."""
    zipf_nbytes: int
    """Of a table that fits into memory."""
    memory: int
    """Bytes that are left of memory where files are mapped; 0 for all."""
    bag_rows: int
    touched: int
    steps: int
    kills: int
    rounds: int
    seconds: float
    batch: int
    row_bytes: tuple[int, ...]
    only: tuple[str, ...]


@dataclass
class Measurements(Comparisons):
    """Everything one run found out."""

    described: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def measure(settings: Settings, progress: Progress) -> Measurements:
    """Run everything in a directory of its own below ``settings.directory``, which is empty again afterwards."""
    check_memory(2 * settings.zipf_nbytes + GIB, "give a smaller --zipf-gib")
    drive.check(settings.directory, (3 if "others" in settings.only else 1) * settings.nbytes)  # each library has a copy
    measurements = Measurements()
    parts = {
        "uniform": compare_with_fio,
        "others": compare_with_others,
        "zipf": compare_with_memory,
        "bag": compare_bags,
        "collection": compare_collections,
        "memory": measure_memory,
        "kills": count_kills,
    }
    with tempfile.TemporaryDirectory(prefix="tables-", dir=settings.directory) as name:
        directory = Path(name)
        cells = directory / "cells"
        if {"uniform", "others", "zipf", "memory"} & set(settings.only):
            progress("laying out the table")
            lay_out(cells, settings.nbytes)
        for part in settings.only:
            parts[part](settings, directory, cells, measurements, progress)
    return measurements


def lay_out(path: Path, nbytes: int) -> None:
    """Write a file of cells, each of which begins with its number."""
    import numpy

    step = 64 * MIB
    generator = numpy.random.default_rng(0)
    block = generator.integers(0, 256, min(step, nbytes), dtype=numpy.uint8).reshape(-1, CELL)
    with path.open("wb", buffering=0) as file:
        for begin in range(0, nbytes, step):
            some = block[: min(step, nbytes - begin) // CELL]
            numbers = numpy.arange(begin // CELL, begin // CELL + len(some), dtype=numpy.int64)
            some[:, :8] = numbers.view(numpy.uint8).reshape(-1, 8)
            file.write(some.tobytes())
        os.fsync(file.fileno())


def worker(directory: Path, module: str = "table_worker", prefix: Sequence[str] = ()) -> WorkerProcess:
    return WorkerProcess(sys.executable, f"harness.{module}", [], directory, prefix=prefix)


def dropped(settings: Settings, path: Path, take: Callable[[], Counts]) -> Callable[[], Counts]:
    """A turn that begins with none of the file in the page cache."""

    def turn() -> Counts:
        files = [each for each in path.rglob("*") if each.is_file()] if path.is_dir() else [path]
        drop_pages(files)
        settle(settings.directory)
        return take()

    return turn


@contextlib.contextmanager
def memory_of(nbytes: int) -> Iterator[None]:
    """Have so much memory left until the end of the block; 0 for all. What is held cannot be reclaimed, but for swapping."""
    held = (available_memory() - nbytes) // GIB * GIB if nbytes else 0
    holding = empty_aligned(held) if held > 0 else None
    try:
        yield
    finally:
        del holding


def compare_with_fio(settings: Settings, directory: Path, cells: Path, measurements: Measurements, progress: Progress) -> None:
    """Uniform random rows."""
    program = shutil.which("fio")
    for row_bytes in settings.row_bytes:
        title = f"uniform rows of {row_bytes} bytes"
        with contextlib.ExitStack() as stack:
            process = stack.enter_context(worker(directory))
            contenders: dict[str, Callable[[], Counts]] = {}
            for how in OURS:
                contenders[how] = partial(
                    process.call,
                    "read",
                    how=how,
                    path=str(cells),
                    row_bytes=row_bytes,
                    rows=settings.nbytes // row_bytes,
                    seconds=settings.seconds,
                    batch=settings.batch,
                )
            if program is not None:
                engine = fio.ioengine(program, directory)
                for depth, jobs in FIO:
                    each = fio.RandomReads(program, engine, cells, depth, jobs, row_bytes)
                    contenders[each.name] = partial(each.measure, settings.seconds)
            turns = {name: dropped(settings, cells, take) for name, take in contenders.items()}
            comparison = measurements.comparisons[title] = measure_interleaved(title, turns, settings.rounds, progress)
        rates = {name: Spread.of(list(map(rate, taken))).median for name, taken in comparison.samples.items() if taken}
        best = max((name for name in rates if name.startswith("fio")), key=lambda name: rates[name], default="fio")
        for how in OURS:
            what = f"{title}: {how} / fio's best ({best})"
            verdict = judge(comparison, what, (how, best), lambda ours, theirs: rate(ours) / rate(theirs), "at least", 0.9)
            measurements.verdicts.append(verdict)


def compare_with_others(settings: Settings, directory: Path, cells: Path, measurements: Measurements, progress: Progress) -> None:
    """What else reads rows by their numbers in Python.

    They have less memory than the table: of one that fits, the kernel's read-ahead soon has all in the page cache, from where
    mapped rows come more quickly than from any drive.
    """
    with memory_of(settings.memory):
        for row_bytes in settings.row_bytes:
            compare_readers(settings, row_bytes, directory, cells, measurements, progress)


def compare_readers(
    settings: Settings, row_bytes: int, directory: Path, cells: Path, measurements: Measurements, progress: Progress
) -> None:
    rows = settings.nbytes // row_bytes
    title = f"readers of rows of {row_bytes} bytes"
    with contextlib.ExitStack() as stack:
        contenders: dict[str, Callable[[], Counts]] = {}
        absent: dict[str, str] = {}
        for how in (OURS[0], *OTHERS):
            process = stack.enter_context(worker(directory))
            path = cells
            if how in OWN_FORMAT:
                path = directory / f"{how}-{row_bytes}"
                progress(f"writing the rows for {how}")
                try:
                    process.call("make", how=how, path=str(path), source=str(cells), row_bytes=row_bytes, rows=rows)
                except ContenderFailed as error:
                    absent[how] = str(error)
                    continue
            take = partial(
                process.call,
                "read",
                how=how,
                path=str(path),
                row_bytes=row_bytes,
                rows=rows,
                seconds=settings.seconds,
                batch=settings.batch,
            )
            contenders[how] = dropped(settings, path, take)
        comparison = measurements.comparisons[title] = measure_interleaved(title, contenders, settings.rounds, progress)
        comparison.absent |= absent
    for how in OWN_FORMAT:
        path = directory / f"{how}-{row_bytes}"
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    for how, bound in OTHERS.items():
        what = f"{title}: times as fast as {how}"
        verdict = judge(comparison, what, (OURS[0], how), lambda ours, theirs: rate(ours) / rate(theirs), "at least", bound)
        measurements.verdicts.append(verdict)


def compare_with_memory(settings: Settings, directory: Path, cells: Path, measurements: Measurements, progress: Progress) -> None:
    """Rows of which some are far more frequent, with a cache of a tenth of the table."""
    for row_bytes in settings.row_bytes:
        rows = settings.zipf_nbytes // row_bytes
        title = f"Zipf({EXPONENT}) rows of {row_bytes} bytes"
        given = {"rows": rows, "exponent": EXPONENT, "batch": settings.batch}
        contenders: dict[str, Callable[[], Counts]] = {}
        best = 0.0
        with contextlib.ExitStack() as stack:
            for how in ("table", "in memory"):
                process = stack.enter_context(worker(directory))
                progress(f"{title}: filling memory")
                # So many draws that the cache has settled: see csrc/tables/use_counts.h.
                prepared = process.call(
                    "prepare",
                    how=how,
                    path=str(cells),
                    row_bytes=row_bytes,
                    memory_budget=settings.zipf_nbytes // 10,
                    warm=20 * rows,
                    **given,
                )
                best = max(best, prepared.get("best_hit_rate", 0.0))
                contenders[how] = partial(process.call, "draw", how=how, seconds=settings.seconds, **given)
            comparison = measurements.comparisons[title] = measure_interleaved(title, contenders, settings.rounds, progress)
        measurements.verdicts += [
            judge(
                comparison,
                f"{title}, a cache of a tenth of the table: speed / that of index_select in memory",
                ("table", "in memory"),
                lambda ours, theirs: rate(ours) / rate(theirs),
                "at least",
                0.5,
            ),
            judge(
                comparison,
                f"{title}: hit rate below that of the best fixed choice, in points",
                ("table",),
                lambda ours, best=best: 100 * (best - ours["hit_rate"]),
                "at most",
                2,
            ),
        ]


def compare_bags(settings: Settings, directory: Path, cells: Path, measurements: Measurements, progress: Progress) -> None:
    """Steps of an EmbeddingBag with SparseAdam, on a table and on mapped files: with less memory than these, and with plenty."""
    name = f"EmbeddingBag, {settings.bag_rows} rows of 128 float32, {settings.touched} rows touched"
    with contextlib.ExitStack() as stack:
        contenders = {
            how: stack.enter_context(bag_steps(settings, directory, name, how, progress)) for how in ("table", "mapped files")
        }
        plenty = f"{name}, all memory"
        measurements.comparisons[plenty] = measure_interleaved(plenty, contenders, settings.rounds, progress)
        title = plenty
        if settings.memory:
            title = f"{name}, {settings.memory / GIB:.1f} GiB of memory"
            with memory_of(settings.memory):
                measurements.comparisons[title] = measure_interleaved(title, contenders, settings.rounds, progress)
    judge_bags(measurements, title, dict.fromkeys((plenty, title)))


def compare_collections(settings: Settings, directory: Path, cells: Path, measurements: Measurements, progress: Progress) -> None:
    """Steps of a collection of four tables, with SparseAdam, and a quarter of the bytes of rows and states as memory."""
    nbytes = settings.bag_rows * 128 * 4 * 3
    limit = 0 if not settings.memory else nbytes // 4
    name = f"EmbeddingBagCollection, 4 tables of together {settings.bag_rows} rows, {settings.touched} rows touched"
    name += f", {limit / GIB:.1f} GiB of memory" if limit else ""
    with contextlib.ExitStack() as stack:
        contenders = {}
        for how in ("table", "mapped files"):
            prefix: Sequence[str] = stack.enter_context(memory_limit(limit)) if limit else ()
            contenders[how] = stack.enter_context(bag_steps(settings, directory, name, how, progress, prefix, tables=4))
        measurements.comparisons[name] = measure_interleaved(name, contenders, settings.rounds, progress)
    judge_bags(measurements, name, (name,))


@contextlib.contextmanager
def bag_steps(
    settings: Settings, directory: Path, name: str, how: str, progress: Progress, prefix: Sequence[str] = (), tables: int = 0
) -> Iterator[Callable[[], Counts]]:
    """Start a process with bags, and yield a turn: some steps, which begin with none of the rows in the page cache."""
    with worker(directory, "bag_worker", prefix) as process:
        progress(f"{name}: making the {how}")
        path = directory / (("bag" if how == "table" else "mapped") + str(tables or ""))
        budget = max(256 * MIB, 4 * settings.touched * 2048) if how == "table" else 0
        shape = {"rows": settings.bag_rows, "width": 128, "touched": settings.touched, "bag": 16, "tables": tables}
        process.call("start", how=how, path=str(path), memory_budget=budget, seed=0, **shape)

        def turn() -> Counts:
            process.call("unmap_pages")
            drop_pages(_files_below(directory, path.name))
            settle(settings.directory)
            return process.call("step", steps=settings.steps)

        yield turn


def judge_bags(measurements: Measurements, title: str, compared: Iterable[str]) -> None:
    """Add the verdicts: a comparison's time, and the losses of all that were compared."""
    measurements.verdicts.append(
        judge(
            measurements.comparisons[title],
            f"{title}: times as fast as mapped files",
            ("table", "mapped files"),
            times_as_fast,
            "at least",
            4,
        )
    )
    for each in compared:
        verdict = judge(
            measurements.comparisons[each],
            f"{each}: losses that differ",
            ("table", "mapped files"),
            lambda ours, theirs: float(ours["loss"] != theirs["loss"]),
            "at most",
            0,
            summed=True,
        )
        measurements.verdicts.append(verdict)


def _files_below(directory: Path, name: str) -> list[Path]:
    return [each for each in directory.rglob("*") if each.is_file() and each.relative_to(directory).parts[0].startswith(name)]


def measure_memory(settings: Settings, directory: Path, cells: Path, measurements: Measurements, progress: Progress) -> None:
    """How far memory grows beyond a budget."""
    budget = 256 * MIB if settings.nbytes > GIB else MIB
    with worker(directory) as process:
        progress("memory")
        given = {"how": "table", "path": str(cells), "row_bytes": CELL, "rows": settings.nbytes // CELL, "batch": settings.batch}
        process.call("read", seconds=0.01, memory_budget=0, **given)  # what libraries and the engine take is not the table's
        taken = process.call("read", seconds=max(settings.seconds, 2), memory_budget=budget, **given)
    growth = taken["peak_growth"]
    figure = None if growth is None else Spread.of([growth / MIB])
    allowed = (budget + BEYOND_BUDGET) / MIB
    what = f"memory of a table of {settings.nbytes / GIB:.1f} GiB with a budget of {budget // MIB} MiB"
    measurements.verdicts.append(Verdict(what, figure, "at most", allowed, "MiB", "" if figure else "peaks cannot be reset here"))


def count_kills(settings: Settings, directory: Path, cells: Path, measurements: Measurements, progress: Progress) -> None:
    """Whether the last commit is there, whole, after a process that trains was killed."""
    progress(f"{settings.kills} kills")
    failed = kills(directory / "killed", settings.kills)
    figure = Spread.of([float(failed)])
    measurements.verdicts.append(Verdict(f"not the last commit, of {settings.kills} kills while training", figure, "at most", 0))


def rate(sample: Counts) -> float:
    """Rows per second."""
    per_second: float = sample["reads"] / sample["seconds"]
    return per_second


def as_table(title: str, comparison: Comparison[str, Counts]) -> str:
    """Rates of each contender, or seconds."""
    rows = []
    for name, samples in comparison.samples.items():
        if name in comparison.absent or not samples:
            rows.append([name, "-", "-", f"left out: {comparison.absent.get(name, '')}"])
            continue
        reads = "reads" in samples[0]
        spread = Spread.of([rate(sample) if reads else sample["seconds"] for sample in samples])
        cpu = Spread.of([sample["cpu_seconds"] / sample["seconds"] for sample in samples])
        rates = [f"{100 * sample['hit_rate']:.2f} % hits" for sample in samples[-1:] if "hit_rate" in sample]
        rows.append([name, spread_text(spread, 0 if reads else 3), f"{cpu.median:.2f}", "".join(rates)])
    rows += [[name, "-", "-", f"left out: {why}"] for name, why in comparison.absent.items() if name not in comparison.samples]
    return table(title, ["contender", "rows/s, or s: median (quartiles)", "cores", ""], rows, left=1)


def parse_arguments(arguments: Sequence[str] | None) -> tuple[Settings, Path | None]:
    parser = Parser(__doc__)
    parser.add_argument("--only", choices=PARTS, action="append", help="a part of it; can be given more than once")
    parser.add_argument("--rounds", type=positive, help="measurements of each contender (default: 3)")
    parser.add_argument("--gib", type=positive, help="of the table that is read uniformly, and of copies (default: 16)")
    parser.add_argument("--zipf-gib", type=positive, help="of the table that is compared with memory (default: 4)")
    parser.add_argument("--row-bytes", type=positive, action="append", help="multiples of 512 (default: 512, 1024 and 4096)")
    parser.add_argument("--memory-gib", type=positive, help="left of memory where files are mapped (default: 3)")
    parser.add_argument("--seconds", type=positive, help="how long each reads in a round (default: 3)")
    parser.add_argument("--batch", type=positive, help=f"numbers of rows in a read (default: {BATCH})")
    parser.add_argument("--kills", type=positive, help="processes to kill (default: 200)")
    parser.add_argument("--quick", action="store_true", help="a trial of the benchmark itself: tiny")
    given = parser.parse(arguments)
    quick = given.quick
    if any(each % CELL for each in given.row_bytes or ()):
        parser.error(f"--row-bytes: must be multiples of {CELL}")
    settings = Settings(
        directory=given.dir,
        nbytes=8 * MIB if quick else (given.gib or 16) * GIB,
        zipf_nbytes=8 * MIB if quick else (given.zipf_gib or 4) * GIB,
        memory=0 if quick else (given.memory_gib or 3) * GIB,
        bag_rows=4096 if quick else 4 << 20,
        touched=256 if quick else 65536,
        steps=1 if quick else 2,
        kills=given.kills or (2 if quick else 200),
        rounds=given.rounds or (2 if quick else 3),
        seconds=given.seconds or (0.05 if quick else 3),
        batch=given.batch or (256 if quick else BATCH),
        row_bytes=tuple(given.row_bytes or (ROW_BYTES[:1] if quick else ROW_BYTES)),
        only=tuple(given.only or PARTS),
    )
    return settings, given.json


def main(arguments: Sequence[str] | None = None) -> int:
    settings, json_path = parse_arguments(arguments)
    with measuring("tables") as started:
        measurements = measure(settings, print_step)
    for title, comparison in measurements.comparisons.items():
        print(as_table(title, comparison))
    print(verdict_table(measurements.verdicts))
    figures = {"comparisons": all_comparisons(measurements.comparisons)}
    write_json(json_path, document("tables", started, settings, measurements.verdicts, **figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
