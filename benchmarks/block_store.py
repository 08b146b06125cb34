"""``BlockStore`` against the engine writing and reading one preallocated file; and how long a lookup takes.

    python benchmarks/block_store.py --dir /mnt/nvme/bench [--size 2GiB] [--rounds 3]

Jobs of 64 blocks, one and eight under way, from and into pinned memory. The engine has the blocks of a job side by side in its
file. The store is full: each put evicts. Contenders take turns; a line has the median of the ratio, store by engine, and its
smallest and largest value. Both read by direct I/O, past the page cache.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from harness import drive
from harness.meter import measure

import deepnvme
from deepnvme.engine import Future
from deepnvme.kvstore import BlocksFuture, BlockStore
from deepnvme.ops import load_async_io
from deepnvme.telemetry.sizes import byte_count

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
        self.pool, self.round = pool, 0
        run(self.put, range(nbytes // pool.shape[1] // JOB + 1), 4)

    def _keys(self, job: int) -> list[bytes]:
        return [b"%d-%d-%d" % (self.round, job, each) for each in range(JOB)]

    def _rows(self, job: int) -> range:
        first = job * JOB % len(self.pool)
        return range(first, first + JOB)

    def put(self, job: int) -> BlocksFuture:
        return self.store.put_many(self._keys(job), self.pool, self._rows(job))

    def get(self, job: int) -> BlocksFuture:
        return self.store.get_many(self._keys(job), self.pool, self._rows(job))

    def close(self) -> None:
        self.store.close()


def ratios(folder: Path, block: int, nbytes: int, rounds: int) -> Iterator[str]:
    """Yield a line for each number of jobs under way and direction."""
    jobs = nbytes // 2 // block // JOB  # half of what the contenders have room for
    with deepnvme.Engine() as engine:
        pool = engine.empty_pinned((8 * JOB, block), dtype=torch.uint8)
    pool.random_(0, 256)
    contenders = {"engine": EngineFile(folder / "file", pool, nbytes), "store": Store(folder / "store", pool, nbytes)}
    for under_way in (1, 8):
        taken: dict[tuple[str, str], list[dict[str, float]]] = {}
        for number in range(rounds):
            contenders["store"].round = f"{under_way}-{number}"  # type: ignore[union-attr,assignment]
            order = list(contenders) if number % 2 == 0 else list(reversed(contenders))
            for direction in ("put", "get"):
                for who in order:
                    start = getattr(contenders[who], direction)
                    shuffled = random.Random(number).sample(range(jobs), jobs) if direction == "get" else range(jobs)
                    figures = measure(partial(run, start, shuffled, under_way))
                    taken.setdefault((who, direction), []).append(figures)  # type: ignore[arg-type]
        for direction in ("put", "get"):
            pairs = list(zip(taken["engine", direction], taken["store", direction], strict=True))
            speeds = sorted(engine["seconds"] / store["seconds"] for engine, store in pairs)
            gigabytes = jobs * JOB * block / 1e9
            rate = statistics.median(gigabytes / store["seconds"] for _, store in pairs)
            cpu = [statistics.median(each[place]["cpu_seconds"] / gigabytes for each in pairs) for place in (0, 1)]
            yield (
                f"{block // 1024:5} KiB, {under_way} under way, {direction}: {statistics.median(speeds):.2f}"
                f" ({speeds[0]:.2f} to {speeds[-1]:.2f}), {rate:.2f} GB/s; CPU s a GB: {cpu[1]:.3f}, engine {cpu[0]:.3f}"
            )
    for each in contenders.values():
        each.close()


def lookups(slots: int) -> str:
    """Return how long a lookup takes in an index of so many keys."""
    index = load_async_io().kvstore.BlockIndex(slots)
    numbers = random.Random(1)
    for first in range(0, slots, 1000):
        index.put([number.to_bytes(32, "little") for number in range(first, min(first + 1000, slots))])
    batches = [[numbers.randrange(slots).to_bytes(32, "little") for _ in range(64)] for _ in range(2000)]
    begin = time.perf_counter()
    found = sum(sum(index.get(batch)) for batch in batches)
    microseconds = (time.perf_counter() - begin) * 1e6 / (64 * len(batches))
    if found < 64 * len(batches):
        raise RuntimeError("keys are missing")
    return f"lookup and use among {slots} keys: {microseconds:.2f} us a key, {index.nbytes / slots:.1f} bytes of memory a key"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, required=True, help="directory on the drive")
    parser.add_argument("--size", default="2GiB", help="bytes of each contender's file (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--blocks", nargs="+", default=["128KiB", "1MiB"], help="sizes of a block")
    parser.add_argument("--keys", type=int, default=1_000_000, help="keys for lookups (default: %(default)s)")
    options = parser.parse_args(arguments)
    options.dir.mkdir(parents=True, exist_ok=True)
    for block in options.blocks:
        with tempfile.TemporaryDirectory(dir=options.dir) as folder:
            for line in ratios(Path(folder), byte_count(block, "--blocks"), byte_count(options.size, "--size"), options.rounds):
                print(line, flush=True)
    print(lookups(options.keys))


if __name__ == "__main__":
    main()
