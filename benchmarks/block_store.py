"""``BlockStore`` against the engine and fio writing and reading one preallocated file; and how long a lookup takes.

    python benchmarks/block_store.py --dir /mnt/nvme/bench [--size 2GiB] [--rounds 3]

Jobs of 64 blocks, one and eight under way, from and into pinned memory. The engine has the blocks of a job side by side in its
file; fio, if it is installed, goes through its file from the beginning, with as many blocks under way as all jobs have, from
and into huge pages where the kernel has them. The store is full: each put evicts. Contenders take turns; a line has the median
of the store's rate by the other's, and its smallest and largest value. All use direct I/O, past the page cache.
"""

from __future__ import annotations

import argparse
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from harness import drive, fio
from harness.meter import measure

import deepnvme
from deepnvme.engine import Future
from deepnvme.kvstore import BlocksFuture, BlockStore
from deepnvme.telemetry.sizes import byte_count
from deepnvme.tools.tune.job import Operation

JOB = 64
Transfer = Callable[[int], Future | BlocksFuture]
"""Starts a job, by its number."""


def run(start: Transfer, jobs: Sequence[int], under_way: int) -> None:
    """Run the jobs, some at a time."""
    futures: list[Future | BlocksFuture] = []
    for number, job in enumerate(jobs):
        if number >= under_way:
            finish(futures[number - under_way])
        futures.append(start(job))
    for future in futures[-under_way:]:
        finish(future)


def finish(future: Future | BlocksFuture) -> None:
    found = future.result()
    if isinstance(found, list) and not all(found):
        raise RuntimeError("a block was not stored, or not found")


class EngineFile:
    """The engine with one file, whose blocks were written before."""

    def __init__(self, path: Path, pool: torch.Tensor, nbytes: int) -> None:
        self.engine = deepnvme.engine_for(path)
        drive.lay_out(path, nbytes, 0)
        self.file = self.engine.open(path, "r+", whole_pages=True)
        self.rows = list(pool)
        self.block = pool.shape[1]

    def _places(self, job: int) -> tuple[list[torch.Tensor], list[int]]:
        first = job * JOB % len(self.rows)
        return self.rows[first : first + JOB], [(job * JOB + each) * self.block for each in range(JOB)]

    def put(self, job: int) -> Future:
        rows, offsets = self._places(job)
        return self.engine.write_many(rows, self.file, offsets)

    def get(self, job: int) -> Future:
        rows, offsets = self._places(job)
        return self.engine.read_many(rows, self.file, offsets)

    def close(self) -> None:
        self.file.close()
        self.engine.close()


class Store:
    """A full store."""

    def __init__(self, path: Path, pool: torch.Tensor, nbytes: int) -> None:
        self.store = BlockStore(path, nbytes, pool.shape[1])
        self.pool, self.jobs, self.round = pool, nbytes // pool.shape[1] // JOB + 1, ""

    def refill(self, name: str) -> None:
        """Begin a round: have the store full of blocks that nobody will ask for."""
        self.store.clear()
        self.round = f"before {name}"
        run(self.put, range(self.jobs), 4)
        self.round = name

    def _keys(self, job: int) -> list[bytes]:
        return [b"%s-%d-%d" % (self.round.encode(), job, each) for each in range(JOB)]

    def _rows(self, job: int) -> range:
        first = job * JOB % len(self.pool)
        return range(first, first + JOB)

    def put(self, job: int) -> BlocksFuture:
        return self.store.put_many(self._keys(job), self.pool, self._rows(job))

    def get(self, job: int) -> BlocksFuture:
        return self.store.get_many(self._keys(job), self.pool, self._rows(job))

    def close(self) -> None:
        self.store.close()


class Fio:
    """fio on one file, in blocks of the same size, with as many under way as the blocks of all jobs."""

    def __init__(self, program: str, path: Path, block: int, nbytes: int) -> None:
        self.program, self.path, self.block = program, path, block
        self.ioengine = fio.ioengine(program, path.parent)
        drive.lay_out(path, nbytes, 0)

    def measure(self, direction: str, jobs: int, under_way: int) -> dict[str, float]:
        operation: Operation = "write" if direction == "put" else "read"
        nbytes, depth = jobs * JOB * self.block, min(JOB * under_way, 256)
        what = (self.program, self.ioengine, operation, [self.path], nbytes, self.block, depth)
        try:
            with fio.huge_pages(depth * self.block + 8 * fio.huge_pages_free()[0], may_reserve=True):
                found = fio.FioTransfer(*what, huge_pages=True).run()
        except fio.HugePagesUnavailable as missing:
            print(f"fio has ordinary buffers: {missing}", file=sys.stderr)
            found = fio.FioTransfer(*what).run()
        return {"seconds": found.seconds, "cpu_seconds": found.cpu_seconds}


def rates(folder: Path, block: int, nbytes: int, rounds: int) -> Iterator[str]:
    """Yield a line for each number of jobs under way, direction and contender."""
    jobs = nbytes // 2 // block // JOB  # half of what the contenders have room for
    with deepnvme.Engine() as engine:
        pool = engine.empty_pinned((8 * JOB, block), dtype=torch.uint8)
    pool.random_(0, 256)
    store, file = Store(folder / "store", pool, nbytes), EngineFile(folder / "file", pool, nbytes)
    program = shutil.which("fio")
    others: dict[str, EngineFile | Fio] = {"engine": file}
    if program:
        others["fio"] = Fio(program, folder / "fio", block, nbytes)
    for under_way in (1, 8):
        taken: dict[tuple[str, str], list[dict[str, float]]] = {}
        for number in range(rounds):
            store.refill(f"{under_way}-{number}")
            order: list[tuple[str, EngineFile | Fio | Store]] = [*others.items(), ("store", store)]
            for direction in ("put", "get"):
                shuffled = random.Random(number).sample(range(jobs), jobs) if direction == "get" else range(jobs)
                for who, contender in order if number % 2 else reversed(order):
                    if isinstance(contender, Fio):
                        figures = contender.measure(direction, jobs, under_way)
                    else:
                        start = getattr(contender, direction)
                        figures = measure(partial(run, start, shuffled, under_way))  # type: ignore[assignment]
                    taken.setdefault((who, direction), []).append(figures)
        gigabytes = jobs * JOB * block / 1e9
        for direction in ("put", "get"):
            ours = taken["store", direction]
            yield (
                f"{block // 1024:5} KiB, {under_way} under way, {direction}: "
                f"{gigabytes / statistics.median(each['seconds'] for each in ours):.2f} GB/s, "
                f"{statistics.median(each['cpu_seconds'] for each in ours) / gigabytes:.3f} CPU s a GB"
            )
            for who in others:
                theirs = taken[who, direction]
                times = sorted(them["seconds"] / us["seconds"] for us, them in zip(ours, theirs, strict=True))
                cpu = statistics.median(each["cpu_seconds"] for each in theirs) / gigabytes
                spread = f"{times[0]:.2f} to {times[-1]:.2f}"
                yield f"      times {who}: {statistics.median(times):.2f} ({spread}); {cpu:.3f} CPU s a GB"
    store.close()
    file.close()


def lookups(folder: Path, slots: int) -> str:
    """Return how long a lookup takes in a store of so many keys, each with a block of one byte."""
    with BlockStore(folder / "keys", 12288 + 4224 * slots, 1) as store:
        numbers = random.Random(1)
        memory = torch.zeros(1000, 1, dtype=torch.uint8)
        for first in range(0, slots, 1000):
            keys = [number.to_bytes(32, "little") for number in range(first, min(first + 1000, slots))]
            store.put_many(keys, memory[: len(keys)]).result()
        batches = [[numbers.randrange(slots).to_bytes(32, "little") for _ in range(64)] for _ in range(2000)]
        begin = time.perf_counter()
        found = sum(sum(store.touch(batch)) for batch in batches)
        microseconds = (time.perf_counter() - begin) * 1e6 / (64 * len(batches))
        if found < 64 * len(batches):
            raise RuntimeError("keys are missing")
        per_key = store.stats().index_bytes / slots
    return f"lookup and use among {slots} keys: {microseconds:.2f} us a key, {per_key:.1f} bytes of memory a key"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, required=True, help="directory on the drive")
    parser.add_argument("--size", default="2GiB", help="bytes of each contender's file (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--blocks", nargs="+", default=["128KiB", "1MiB", "2MiB"], help="sizes of a block")
    parser.add_argument("--keys", type=int, default=1_000_000, help="keys for lookups (default: %(default)s)")
    options = parser.parse_args(arguments)
    options.dir.mkdir(parents=True, exist_ok=True)
    for block in options.blocks:
        with tempfile.TemporaryDirectory(dir=options.dir) as folder:
            for line in rates(Path(folder), byte_count(block, "--blocks"), byte_count(options.size, "--size"), options.rounds):
                print(line, flush=True)
    with tempfile.TemporaryDirectory(dir=options.dir) as folder:
        print(lookups(Path(folder), options.keys))


if __name__ == "__main__":
    main()
