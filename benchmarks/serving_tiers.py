"""The tiers of KV blocks for vLLM, SGLang and LMCache, against those that these projects bring: each by its project's interface.

    python benchmarks/serving_tiers.py --dir /mnt/nvme/bench --packages FOLDER [--only vllm] [--size 1GiB] [--rounds 3]

FOLDER has the packages: ``make test-serving`` puts them into .venv/serving. Jobs of 64 blocks, one and eight under way (SGLang
waits for each), from and into the same memory. Contenders take turns. A put ends when what it wrote is on the drive (``syncfs``);
a get begins without anything in the page cache, in another order. Our store is full: each put evicts. The others never delete
here, and begin each round with an empty folder. A line has the median of theirs by ours in seconds, the smallest and the largest
value, our rate, and the processor time of both for a GB.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import random
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from harness import serving_contenders
from harness.meter import measure
from harness.serving_contenders import JOB, Contender, run

import deepnvme
from deepnvme.telemetry.sizes import byte_count

Make = Callable[[Path, torch.Tensor, int], Contender]


def flush(folder: Path) -> None:
    """Have what is in a folder on the drive."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).syncfs(descriptor):
            raise OSError(ctypes.get_errno(), "syncfs", str(folder))
    finally:
        os.close(descriptor)


def forget_pages(folder: Path) -> None:
    """Have nothing of a folder's files in the page cache."""
    flush(folder)
    for file in folder.rglob("*"):
        if file.is_file():
            with file.open("rb") as opened:
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


class Lane:
    """A contender in a folder of its own."""

    def __init__(self, name: str, make: Make, folder: Path, pool: torch.Tensor, nbytes: int) -> None:
        self.name, self.folder, self._pool = name, folder, pool
        self.ours = name == "ours"
        folder.mkdir()
        self.contender = make(folder, pool, nbytes)
        self.samples: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
        self._check()
        self._fills, self._to_fill = 0, nbytes // pool[0].nbytes // JOB + 1
        self.empty()

    def jobs(self, label: str, count: int) -> list[tuple[Any, Sequence[int]]]:
        """Return keys and rows of jobs."""
        found = []
        for job in range(count):
            first = job * JOB % len(self._pool)
            keys = [f"{label}-{job}-{block}".encode().ljust(32) for block in range(JOB)]
            found.append((self.contender.prepare(keys), range(first, first + JOB)))
        return found

    def _check(self) -> None:
        """Raise RuntimeError unless blocks come back as they were. Also warms the contender up."""
        before, jobs = self._pool[:JOB].clone(), self.jobs("check", 1)
        run(self.contender, True, jobs, 1)
        self._pool[:JOB].zero_()
        run(self.contender, False, jobs, 1)
        if not torch.equal(self._pool[:JOB], before):
            raise RuntimeError(f"{self.name} returned other bytes")

    def measure(self, put: bool, jobs: Sequence[tuple[Any, Sequence[int]]], under_way: int) -> None:
        forget_pages(self.folder)

        def transfer() -> None:
            run(self.contender, put, jobs, under_way)
            if put:
                flush(self.folder)

        self.samples[put].append(measure(transfer))

    def empty(self) -> None:
        """Remove what the round has left. Ours is full afterwards, of blocks that nobody reads."""
        if self.ours:
            self.contender.clear()
            self._fills += 1
            run(self.contender, True, self.jobs(f"full-{self._fills}", self._to_fill), 4)
        else:
            for file in self.folder.rglob("*"):
                if file.is_file() and file.suffix in (".bin", ".data"):
                    file.unlink()


def lines_of(project: str, makes: dict[str, Make], folder: Path, block: int, nbytes: int, rounds: int) -> Iterator[str]:
    """Yield a line for each number of jobs under way, direction and contender."""
    count = nbytes // 2 // block // JOB
    with deepnvme.Engine() as engine:
        pool = engine.empty_pinned((min(8, count) * JOB, block), dtype=torch.uint8)
    pool.random_(0, 256)
    lanes = [Lane(name, make, folder / name, pool, nbytes) for name, make in makes.items()]
    for under_way in (1,) if project == "sglang" else (1, 8):
        for lane in lanes:
            lane.samples = {True: [], False: []}
        for number in range(rounds):
            for lane in lanes if number % 2 == 0 else reversed(lanes):
                jobs = lane.jobs(f"{under_way}-{number}", count)
                lane.measure(True, jobs, under_way)
                lane.measure(False, random.Random(number).sample(jobs, count), under_way)
                lane.empty()
        gigabytes = count * JOB * block / 1e9
        ours = next(lane for lane in lanes if lane.ours)
        for put in (True, False):
            for lane in lanes:
                if lane.ours:
                    continue
                pairs = list(zip(lane.samples[put], ours.samples[put], strict=True))
                ratios = sorted(theirs["seconds"] / mine["seconds"] for theirs, mine in pairs)
                cpu = [statistics.median(pair[side]["cpu_seconds"] / gigabytes for pair in pairs) for side in (1, 0)]
                rate = gigabytes / statistics.median(mine["seconds"] for _, mine in pairs)
                yield (
                    f"{project}, {block // 1024:4} KiB, {under_way} under way, {'put' if put else 'get'}, by {lane.name}:"
                    f" {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}), {rate:.2f} GB/s;"
                    f" CPU s a GB: {cpu[0]:.3f}, theirs {cpu[1]:.3f}"
                )
    for lane in lanes:
        lane.contender.close()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, required=True, help="directory on the drive")
    parser.add_argument("--packages", type=Path, required=True, help="folder with vLLM, SGLang and LMCache")
    parser.add_argument("--only", nargs="+", choices=serving_contenders.PROJECTS, default=list(serving_contenders.PROJECTS))
    parser.add_argument("--size", default="1GiB", help="bytes of our store; half of it is put and got (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--blocks", nargs="+", default=["128KiB", "1MiB", "2MiB"], help="sizes of a block")
    options = parser.parse_args(arguments)
    options.dir.mkdir(parents=True, exist_ok=True)
    for project in options.only:
        makes = serving_contenders.PROJECTS[project](options.packages.resolve())
        for block in options.blocks:
            folder = Path(tempfile.mkdtemp(dir=options.dir))
            try:
                for line in lines_of(
                    project, makes, folder, byte_count(block, "--blocks"), byte_count(options.size, "--size"), options.rounds
                ):
                    print(line, flush=True)
            finally:
                shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
