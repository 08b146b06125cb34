"""The process in which rows of a table are read: ``python -m harness.table_worker REQUESTS REPLIES``.

The table is a raw file of cells of 512 bytes, each of which begins with its number: so rows of several sizes are in the same
file, and what was read can be checked. Other libraries read formats of their own, which are made of it.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from harness.meter import measure
from harness.serving import serve

CELL = 512
THREADS = 64
_IN_FLIGHT = 2
_MAKE_BYTES = 64 << 20

Read = Callable[[torch.Tensor], torch.Tensor]


class Worker:
    """One thread that reads batches of rows, by one of several means."""

    def describe(self) -> dict[str, Any]:
        return {"torch": torch.__version__}

    def make(self, *, how: str, path: str, source: str, row_bytes: int, rows: int) -> dict[str, Any]:
        """Write the first rows of the raw file in the format of another library."""
        raw = torch.from_file(source, shared=False, size=rows * row_bytes, dtype=torch.uint8).view(rows, row_bytes)
        _MAKERS[how](raw, Path(path))
        return {}

    def read(
        self, *, how: str, path: str, row_bytes: int, rows: int, seconds: float, batch: int, memory_budget: int = 0
    ) -> dict[str, Any]:
        """Read batches of random rows for some time.

        The file is opened each time: pages that stayed mapped could not be dropped from the page cache before the next. And the
        first batch is measured too: it has the kernel read far ahead in mapped files.
        """
        read = _READERS[how](path, row_bytes, rows, memory_budget)
        ids = torch.randint(rows, (64, batch))
        batches = 0

        def run() -> None:
            nonlocal batches
            end = time.perf_counter() + seconds
            while time.perf_counter() < end:
                read(ids[batches % 64])
                batches += 1

        def run_overlapping() -> None:
            nonlocal batches
            under_way: deque[Any] = deque()
            end = time.perf_counter() + seconds
            while time.perf_counter() < end:
                if len(under_way) == _IN_FLIGHT:
                    under_way.popleft().result()
                under_way.append(read.overlapping(ids[batches % 64]))  # type: ignore[attr-defined]
                batches += 1
            for each in under_way:
                each.result()

        measured = measure(run_overlapping if hasattr(read, "overlapping") else run)
        self._check(read(ids[0]), ids[0], row_bytes)
        return {"reads": batches * batch, **measured}

    def _check(self, found: torch.Tensor, ids: torch.Tensor, row_bytes: int) -> None:
        first = found.reshape(len(ids), -1).view(torch.uint8)[:, :8].contiguous().view(torch.int64).flatten()
        if not torch.equal(first, ids * (row_bytes // CELL)):
            raise ValueError("the rows are not those of the file")


def _table(path: str, row_bytes: int, rows: int, memory_budget: int) -> Read:
    from deepnvme.tables import Table

    table = Table.open(path, dtype=torch.uint8, shape=row_bytes, memory_budget=memory_budget)
    return lambda ids: table.read(ids)  # type: ignore[return-value]


class _Overlapping:
    def __init__(self, path: str, row_bytes: int, rows: int, memory_budget: int) -> None:
        from deepnvme.tables import Table

        self._table = Table.open(path, dtype=torch.uint8, shape=row_bytes, memory_budget=memory_budget)
        self.overlapping = self._table.read_async

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        return self.overlapping(ids).result()


def _memmap(path: str, row_bytes: int, rows: int, memory_budget: int) -> Read:
    import numpy

    mapped = numpy.memmap(path, dtype=numpy.uint8, mode="r", shape=(rows, row_bytes))
    return lambda ids: torch.from_numpy(mapped[ids.numpy()])


def _from_file(path: str, row_bytes: int, rows: int, memory_budget: int) -> Read:
    mapped = torch.from_file(path, shared=False, size=rows * row_bytes, dtype=torch.uint8).view(rows, row_bytes)
    return lambda ids: mapped[ids]


def _preadv(path: str, row_bytes: int, rows: int, memory_budget: int) -> Read:
    """As engines do that have a reader of their own: threads that read straight into the rows of the result."""
    descriptor = os.open(path, os.O_RDONLY)
    pool = ThreadPoolExecutor(THREADS)

    def read(ids: torch.Tensor) -> torch.Tensor:
        out = torch.empty(len(ids), row_bytes, dtype=torch.uint8)
        memory, numbers = memoryview(out.numpy()).cast("B"), ids.tolist()

        def some(begin: int) -> None:
            for place in range(begin, len(numbers), THREADS):
                at = place * row_bytes
                os.preadv(descriptor, [memory[at : at + row_bytes]], numbers[place] * row_bytes)

        futures: list[Future[None]] = [pool.submit(some, begin) for begin in range(THREADS)]
        for future in futures:
            future.result()
        return out

    return read


def _datasets(path: str, row_bytes: int, rows: int, memory_budget: int) -> Read:
    from datasets import Dataset

    dataset = Dataset.from_file(path).with_format("arrow")  # the quickest: others convert each value

    def read(ids: torch.Tensor) -> torch.Tensor:
        return _as_rows(dataset[ids.numpy()].column("row"), row_bytes)

    return read


def _lance(path: str, row_bytes: int, rows: int, memory_budget: int) -> Read:
    import lance

    dataset = lance.dataset(path)

    def read(ids: torch.Tensor) -> torch.Tensor:
        return _as_rows(dataset.take(ids.numpy(), columns=["row"]).column("row"), row_bytes)

    return read


def _as_rows(column: Any, row_bytes: int) -> torch.Tensor:
    flat = column.combine_chunks().flatten().to_numpy()
    return torch.from_numpy(flat.reshape(-1, row_bytes).copy())


def _arrow_batches(raw: torch.Tensor) -> Any:
    import pyarrow

    step = max(_MAKE_BYTES // raw.shape[1], 1)
    kind = pyarrow.list_(pyarrow.uint8(), raw.shape[1])
    for some in torch.split(raw, step):
        flat = pyarrow.array(some.reshape(-1).numpy())
        yield pyarrow.record_batch([pyarrow.FixedSizeListArray.from_arrays(flat, type=kind)], names=["row"])


def _make_datasets(raw: torch.Tensor, path: Path) -> None:
    import pyarrow

    batches = _arrow_batches(raw)
    first = next(batches)
    with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_stream(file, first.schema) as stream:
        stream.write_batch(first)
        for batch in batches:
            stream.write_batch(batch)


def _make_lance(raw: torch.Tensor, path: Path) -> None:
    import lance
    import pyarrow

    batches = _arrow_batches(raw)
    first = next(batches)

    def all_batches() -> Any:
        yield first
        yield from batches

    lance.write_dataset(pyarrow.RecordBatchReader.from_batches(first.schema, all_batches()), str(path))


class Zipf:
    """Numbers of rows of which the k-th most frequent is k**-exponent as frequent as the first; which is which is random."""

    def __init__(self, rows: int, exponent: float, seed: int) -> None:
        weights = torch.arange(1, rows + 1, dtype=torch.float64).pow_(-exponent)
        self.cumulative = weights.cumsum_(0).div_(weights[-1].item())
        self._generator = torch.Generator().manual_seed(seed)
        self.rows = torch.randperm(rows, generator=self._generator)
        """The most frequent first."""

    def draw(self, count: int) -> torch.Tensor:
        drawn = torch.rand(count, dtype=torch.float64, generator=self._generator)
        return self.rows[torch.searchsorted(self.cumulative, drawn).clamp_(max=len(self.rows) - 1)]


@functools.cache
def _zipf(rows: int, exponent: float) -> Zipf:
    return Zipf(rows, exponent, seed=1)


class ZipfWorker(Worker):
    """Reads rows some of which are far more frequent, from a table with a cache or from memory."""

    def __init__(self) -> None:
        self._tables: dict[str, Any] = {}

    def prepare(
        self, *, how: str, path: str, row_bytes: int, rows: int, exponent: float, batch: int, memory_budget: int, warm: int
    ) -> dict[str, Any]:
        """Open the table, and read so many numbers of rows that the cache has settled."""
        zipf = _zipf(rows, exponent)
        if how == "in memory":
            mapped = torch.from_file(path, shared=False, size=rows * row_bytes, dtype=torch.uint8)
            self._tables[how] = mapped.clone().view(rows, row_bytes)
            return {}
        from deepnvme.tables import Table

        table = Table.open(path, dtype=torch.uint8, shape=row_bytes, memory_budget=memory_budget)
        for _ in range(warm // batch):
            table.read(zipf.draw(batch))
        self._tables[how] = table
        share = zipf.cumulative[table.stats().cache_capacity - 1].item()
        return {"capacity": table.stats().cache_capacity, "best_hit_rate": share}

    def draw(self, *, how: str, rows: int, exponent: float, seconds: float, batch: int) -> dict[str, Any]:
        """Read batches for some time."""
        table = self._tables[how]
        zipf = _zipf(rows, exponent)
        ids = [zipf.draw(batch) for _ in range(256)]
        before = None if how == "in memory" else table.stats()
        batches = 0

        def run() -> None:
            nonlocal batches
            end = time.perf_counter() + seconds
            under_way: deque[Any] = deque()
            while time.perf_counter() < end:
                some = ids[batches % len(ids)]
                if how == "in memory":
                    table.index_select(0, some)
                else:
                    if len(under_way) == _IN_FLIGHT:
                        under_way.popleft().result()
                    under_way.append(table.read_async(some))
                batches += 1
            for each in under_way:
                each.result()

        measured = measure(run)
        found: dict[str, Any] = {"reads": batches * batch, **measured}
        if before is not None:
            after = table.stats()
            found["hit_rate"] = (after.hits - before.hits) / (after.hits + after.misses - before.hits - before.misses)
        return found


_READERS: dict[str, Callable[[str, int, int, int], Read]] = {
    "table": _table,
    "table, overlapping": _Overlapping,
    "numpy.memmap": _memmap,
    "torch.from_file": _from_file,
    "os.preadv": _preadv,
    "datasets": _datasets,
    "lance": _lance,
}
_MAKERS = {"datasets": _make_datasets, "lance": _make_lance}


if __name__ == "__main__":
    serve(ZipfWorker, ("make", "read", "prepare", "draw"), int(sys.argv[1]), int(sys.argv[2]))
