"""Samples in random order from a drive: ``deepnvme.data``, against ``os.preadv`` in 16 threads, torch's DataLoader and np.memmap;
and against spdl, Lance, ArrayRecord, Grain, WebDataset, LitData, MosaicML and Hugging Face datasets, those of them that are
installed.

    python benchmarks/samples.py --dir /mnt/nvme --json samples.json

Samples of 4 KiB, 114 KB and 3 MB without decoding, which are not cached; fio reads blocks of about the same size. JPEGs of about
156 KB, which are decoded. Windows of 8 KiB at any offset of a file of tokens, with a fifth of its size as memory, in a control
group. Rates begin with the first batch, so that they do not have the start of workers.
"""

from __future__ import annotations

import contextlib
import shutil
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from harness import drive, fio
from harness.command_line import Parser, Progress, measuring, print_step, write_json
from harness.comparison import Comparison, Comparisons, Counts, judge, measure_interleaved
from harness.documents import document
from harness.memory_limit import memory_limit
from harness.other_loaders import FORMATS
from harness.sample_worker import CONTENDERS, file_of
from harness.tables import spread_text, table, verdict_table
from harness.worker_process import WorkerProcess

from deepnvme.tools.tune.command_line import positive, size
from deepnvme.tools.tune.figures import Spread
from deepnvme.tools.tune.folder import drop_pages, settle

MIB = 1 << 20
SIZES = {"4 KiB": (4096, 1024, 2.5), "114 KB": (114_000, 128, 4.0), "3 MB": (3_000_000, 8, 4.0)}
"""Bytes of a sample, samples of a batch, and how many times as fast as torch's loader ours has to be."""
OURS, THREADS, ALONE, MAPPED = "deepnvme", "preadv in 16 threads", "decoding alone", "np.memmap"
FIO = "fio, depth 64, 1 job"
PARTS = (*SIZES, "JPEG", "tokens")


@dataclass(frozen=True)
class Settings:
    """How much to measure."""

    directory: Path
    parts: tuple[str, ...]
    size: int
    tokens: int
    rounds: int
    seconds: float
    quick: bool


def measure(settings: Settings, progress: Progress) -> Comparisons:
    """Run everything in a directory of its own below ``settings.directory``, which is empty again afterwards."""
    found = Comparisons()
    for part in settings.parts:
        with tempfile.TemporaryDirectory(prefix="samples-", dir=settings.directory) as name:
            drive.check(Path(name), max(settings.size, settings.tokens if part == "tokens" else 0))
            progress(f"{part}: writing")
            run = _tokens if part == "tokens" else _jpegs if part == "JPEG" else partial(_sizes, part)
            run(settings, Path(name), progress, found)
    return found


@contextlib.contextmanager
def _worker(directory: Path, prefix: Sequence[str] = ()) -> Iterator[WorkerProcess]:
    with WorkerProcess(sys.executable, "harness.sample_worker", [], directory, prefix=prefix) as worker:
        yield worker


def _racing(worker: WorkerProcess, kind: str, path: Path, batch: int, seconds: float) -> dict[str, partial[Counts]]:
    """What each contender does in a turn: read files that are not cached."""

    def prepared(contender: str) -> Counts:
        drop_pages(file for file in path.parent.rglob("*") if file.is_file())
        settle(path.parent)
        return worker.call("read", kind=kind, contender=contender, path=str(path), batch=batch, seconds=seconds)

    return {contender: partial(prepared, contender) for contender in CONTENDERS[kind]}


def _best_of_torch(comparison: Comparison[str, Counts]) -> str:
    """The number of workers with which torch's loader was fastest."""
    of_torch = [name for name in comparison.samples if name.startswith("torch's") and name not in comparison.absent]
    return max(of_torch, key=lambda name: statistics.median(map(rate, comparison.samples[name])))


def _sizes(part: str, settings: Settings, directory: Path, progress: Progress, found: Comparisons) -> None:
    nbytes, batch, target = SIZES[part]
    path = directory / "samples"
    with _worker(directory) as worker:
        count = settings.size // nbytes
        worker.call("write", directory=str(path), size=nbytes, count=count)
        for name in (name for name, other in FORMATS.items() if other.installed):
            worker.call("write_other", name=name, directory=str(path), size=nbytes, count=count)
        file = Path(file_of(str(path)))
        racing = _racing(worker, "samples", path, batch, settings.seconds)
        if program := shutil.which("fio"):
            job = fio.RandomReads(program, fio.ioengine(program, directory), file, 64, 1, -(-nbytes // 512) * 512)
            racing[FIO] = partial(job.measure, settings.seconds)  # type: ignore[assignment]
        comparison = found.comparisons[part] = measure_interleaved(part, racing, settings.rounds, progress)
    judged, torchs = partial(judge, comparison), _best_of_torch(comparison)
    for other, bound in ((FIO, 0.9), (THREADS, 1.0), (torchs, target)):
        what = f"{part}: samples a second, ours / {other}"
        found.verdicts.append(judged(what, (OURS, other), times_as_many, "at least", bound))
    for other in (THREADS, torchs):
        what = f"{part}: CPU seconds a sample, ours / {other}"
        found.verdicts.append(judged(what, (OURS, other), times_the_cpu, "at most", 1 / 3))


def _jpegs(settings: Settings, directory: Path, progress: Progress, found: Comparisons) -> None:
    path = directory / "samples"
    with _worker(directory) as worker:
        worker.call("write_jpegs", directory=str(path), nbytes=settings.size)
        racing = _racing(worker, "jpeg", path, 64, 4 * settings.seconds)  # until memory is used again: new memory takes as long
        comparison = found.comparisons["JPEG"] = measure_interleaved("JPEG", racing, settings.rounds, progress)
    for other, bound in ((_best_of_torch(comparison), 1.3), (ALONE, 0.95)):
        what = f"JPEG: images a second, ours / {other}"
        found.verdicts.append(judge(comparison, what, (OURS, other), times_as_many, "at least", bound))


def _tokens(settings: Settings, directory: Path, progress: Progress, found: Comparisons) -> None:
    path = directory / "tokens.bin"
    with path.open("wb", buffering=0) as file:
        for _ in range(settings.tokens // (64 * MIB)):
            file.write(torch.randint(0, 30_000, (32 * MIB,), dtype=torch.int16).numpy().tobytes())
    with contextlib.ExitStack() as stack:
        prefix: Sequence[str] = () if settings.quick else stack.enter_context(memory_limit(settings.tokens // 5))
        worker = stack.enter_context(_worker(directory, prefix))
        racing = _racing(worker, "tokens", path, 64, settings.seconds)
        comparison = found.comparisons["tokens"] = measure_interleaved("tokens", racing, settings.rounds, progress)
    what = f"tokens: windows a second, ours / {MAPPED}"
    found.verdicts.append(judge(comparison, what, (OURS, MAPPED), times_as_many, "at least", 10))


def rate(sample: Counts) -> float:
    """Samples a second."""
    per_second: float = sample["rate"] if "rate" in sample else sample["reads"] / sample["seconds"]
    return per_second


def cpu_a_sample(sample: Counts) -> float:
    """Microseconds."""
    return 1e6 * float(sample["cpu_seconds"]) / float(sample["samples"] if "samples" in sample else sample["reads"])


def times_as_many(ours: Counts, theirs: Counts) -> float:
    return rate(ours) / rate(theirs)


def times_the_cpu(ours: Counts, theirs: Counts) -> float:
    return cpu_a_sample(ours) / max(cpu_a_sample(theirs), 1e-3)


def as_table(title: str, comparison: Comparison[str, Counts]) -> str:
    """Rates, CPU time and the time to the first batch of each contender."""
    nbytes = {**SIZES, "JPEG": (156_000,), "tokens": (8192,)}[title][0]
    rows = []
    for name, samples in comparison.samples.items():
        if name in comparison.absent:
            rows.append([name, "-", "-", "-", "-", f"failed: {comparison.absent[name]}"])
            continue
        rates, cpu = (Spread.of([figure(sample) for sample in samples]) for figure in (rate, cpu_a_sample))
        first = Spread.of([sample.get("first_batch", 0.0) for sample in samples])
        gigabyte = f"{cpu.median * 1000 / nbytes:.3f}"
        rows.append([name, spread_text(rates, 0), spread_text(cpu), gigabyte, spread_text(first, 3), ""])
    header = ["contender", "samples/s, median (quartiles)", "CPU us a sample", "CPU s a GB", "first batch, s", ""]
    return table(f"{title} in random order", header, rows, left=1)


def parse_arguments(arguments: Sequence[str] | None) -> tuple[Settings, Path | None]:
    parser = Parser(__doc__)
    parser.add_argument("--part", action="append", choices=PARTS, help="only this one; may be given several times")
    parser.add_argument("--rounds", type=positive, help="measurements of each contender (default: 3)")
    parser.add_argument("--size", type=size, help="bytes of the samples of each size (default: 2G)")
    parser.add_argument("--tokens", type=size, help="bytes of the file of tokens (default: 8G)")
    parser.add_argument("--seconds", type=positive, help="how long each reads in a round (default: 2)")
    parser.add_argument("--quick", action="store_true", help="a trial of the benchmark itself: tiny, without a control group")
    given = parser.parse(arguments)
    settings = Settings(
        directory=given.dir,
        parts=tuple(given.part or PARTS),
        size=given.size or (30 * MIB if given.quick else 2 << 30),
        tokens=given.tokens or (64 * MIB if given.quick else 8 << 30),
        rounds=given.rounds or (1 if given.quick else 3),
        seconds=given.seconds or (0.2 if given.quick else 2),
        quick=given.quick,
    )
    return settings, given.json


def main(arguments: Sequence[str] | None = None) -> int:
    settings, json_path = parse_arguments(arguments)
    with measuring("samples") as started:
        found = measure(settings, print_step)
    for title, comparison in found.comparisons.items():
        print(as_table(title, comparison))
    print(verdict_table(found.verdicts))
    figures = {title: comparison.as_json() for title, comparison in found.comparisons.items()}
    write_json(json_path, document("samples", started, settings, found.verdicts, comparisons=figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
