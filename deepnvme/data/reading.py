"""Reads of batches: samples by number -> ranges of files, one engine call, and samples or errors that name the sample.

A batch takes a fixed number of tensor operations, whatever its size. Python runs for each range that is read, and for each sample
only if samples have columns of variable length.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from deepnvme.checkpoint.file_io import is_replaced
from deepnvme.drives.aio_config import AioConfig
from deepnvme.drives.profiles import engine_for
from deepnvme.engine import File, Future
from deepnvme.memory.alignment import padded
from deepnvme.memory.host import empty_aligned
from deepnvme.memory.pool import BufferPool, OutOfBuffers
from deepnvme.memory.tensor_bytes import crc32_mismatches, memory_of

from .layouts import CorruptSamples, Empty, Layout, Places, SampleUnreadable, distinct

_OPEN_FILES = 128
"""Most files that stay open, with up to 2 descriptors each. A batch that needs more has them open until it is read; systems allow
1024 descriptors or more."""
_RUN_BYTES = 4 << 20
"""Neighbouring samples are read by one transfer, which begins no further than this from where it must end."""
_GAP_BYTES = 4096
"""Most bytes between two samples that are read along with them: headers between samples, and padding."""
_CACHE_LINE = 64
_INDEX_BYTES = 32 << 20
"""Most bytes of indexes that are kept in memory: of 2 million samples. Entries of other indexes are read for each batch."""

Skipped = Callable[[SampleUnreadable], object]


class Runs(NamedTuple):
    """Ranges of files that are read, and which of them has each sample. int64 tensors. Ascending in ``first``: samples that are
    read alone lie in memory as in the batch."""

    begins: torch.Tensor
    ends: torch.Tensor
    first: torch.Tensor
    """Index of the sample with which each run begins."""
    of: torch.Tensor
    """Index of the run of each sample."""


def group_runs(places: Places, sector: int) -> Runs:
    """Group samples into runs, which begin and end at sectors: neighbours together, at most about ``_RUN_BYTES``."""
    begins = places.offsets // sector * sector
    ends = -(-(places.offsets + places.nbytes) // sector) * sector
    order = begins.argsort(stable=True)
    order = order[places.files[order].argsort(stable=True)]
    files, begins, ends = places.files[order], begins[order], ends[order]
    apart = torch.ones_like(files, dtype=torch.bool)
    apart[1:] = (files.diff() != 0) | (begins[1:] - ends[:-1] > _GAP_BYTES) | ((begins // _RUN_BYTES).diff() != 0)
    first = order[apart]
    rank = first.argsort()
    run = torch.empty_like(rank).scatter_(0, rank, torch.arange(len(rank)))[apart.cumsum(0) - 1]
    found = torch.zeros_like(rank).scatter_reduce_(0, run, ends, "amax")
    return Runs(begins[apart][rank], found, first[rank], torch.empty_like(run).scatter_(0, order, run))


class SampleReader:
    """The engine and the open files of a layout, in one process. Thread-safe.

    Args:
        layout: Where the samples are.
        aio_config: Settings of the engine; None for the profile of the drive.
    """

    def __init__(self, layout: Layout, aio_config: AioConfig | None) -> None:
        self.layout = layout
        self.process = os.getpid()
        directories = list(dict.fromkeys(path.parent for path in layout.files))
        self._engine = engine_for(directories or ["."], aio_config)
        self._index_engine = engine_for(directories or ["."], aio_config)  # entries of an index do not wait behind samples
        self._indexes: dict[Path, torch.Tensor] = {}
        self._index_bytes = _INDEX_BYTES
        self._files: dict[Path, File] = {}
        self._lock = threading.Lock()

    def start(self, numbers: torch.Tensor, pool: BufferPool | None, only_leased: bool = False) -> BatchRead:
        """Start reading samples by one call of the engine; return when the reads are submitted. Blocks for an index.

        Args:
            numbers: Numbers of the samples, int64, each of them valid; the same one may occur several times.
            pool: Leases the memory. Without it, or if it has no memory free, the system's is used.
            only_leased: Whether to raise if the pool has no memory free.

        Raises:
            OSError: If a file cannot be opened, or an index cannot be read or is damaged.
            OutOfBuffers: If the pool has no memory free, and only leased memory is wanted.
        """
        places = self.layout.places(numbers, self._records)
        used = distinct(places.files)
        try:
            files = {number: self._file(self.layout.files[number], True) for number in used}
        except OSError as error:
            if error.errno == errno.EMFILE:
                error.strerror = f"the samples are in {len(used)} files, which exceeds the limit of open files (ulimit -n)"
            raise
        sizes = torch.zeros(len(self.layout.files), dtype=torch.int64)
        sizes[used] = torch.tensor([file.size() for file in files.values()], dtype=torch.int64)
        sizes = sizes[places.files]
        sector = max((file.sector_size for file in files.values()), default=1)
        unit = max(sector, _CACHE_LINE)
        begins, ends, first, run = group_runs(places, sector)
        ends = ends.minimum(sizes[first])  # the last sector of a file may be a part of one; or the file was cut off
        begins = begins.minimum(ends)
        spans = -(-(ends - begins) // unit) * unit
        starts = spans.cumsum(0) - spans
        memory = _memory(int(spans.sum()), pool, only_leased)
        tensors = list(memory.split_with_sizes(spans.tolist()))
        for index in (ends - begins != spans).nonzero().flatten().tolist():
            tensors[index] = tensors[index][: int(ends[index] - begins[index])]
        sources = files[used[0]] if len(used) == 1 else [files[number] for number in places.files[first].tolist()]
        future = self._engine.read_many(tensors, sources, begins.tolist()) if tensors else None
        missing = places.offsets + places.nbytes > sizes
        return BatchRead(self.layout, numbers, places, missing, run, (starts - begins)[run] + places.offsets, memory, future)

    def _records(self, path: Path, numbers: torch.Tensor, words: int) -> torch.Tensor:
        """Read records of an index. Blocks. Raises OSError; CorruptSamples if the index ends before one of them."""
        index = self._indexes.get(path)
        if index is None:
            file = self._file(path, False)
            count = file.size() // (8 * words)
            if 8 * words * count <= self._index_bytes:
                index = torch.empty((count, words), dtype=torch.int64)
                self._index_engine.read(index, file).result()
                self._indexes[path] = index
                self._index_bytes -= index.nbytes
        missing = numbers[numbers >= (count if index is None else len(index))]
        if len(missing):
            raise CorruptSamples(path, f"it ends before its entry {int(missing[0])}")
        if index is not None:
            return index[numbers]
        found = torch.empty((len(numbers), words), dtype=torch.int64)
        self._index_engine.gather(file, numbers, found).result()
        return found

    def _file(self, path: Path, whole_sectors: bool) -> File:
        with self._lock:
            file = self._files.pop(path, None)
            while file is None:
                try:
                    file = self._engine.open(path, "r", whole_sectors=whole_sectors)
                except OSError as error:
                    if error.errno != errno.EMFILE or not self._files:
                        raise
                    self._files.pop(next(iter(self._files)))  # closed with its last reference
            while len(self._files) >= _OPEN_FILES:
                self._files.pop(next(iter(self._files)))
            self._files[path] = file  # the one used last is at the end
            return file


def _memory(nbytes: int, pool: BufferPool | None, only_leased: bool) -> torch.Tensor:
    """Return memory for a batch, aligned to pages. It belongs to the tensors over it."""
    if pool is not None:
        step = max(1 << max(nbytes.bit_length() - 4, 0), 4096)  # batches differ by some percent: sizes that occur again
        lease = pool.try_lease(padded(nbytes, step))
        if lease is not None:
            return lease.buffer[:nbytes]  # the lease ends at once, its memory is lent until no view is left
        if only_leased:
            raise OutOfBuffers(f"a batch needs {nbytes} bytes")
    return empty_aligned(padded(nbytes))[:nbytes]


@dataclass(eq=False)
class BatchRead:
    """A read of a batch in progress."""

    layout: Layout
    numbers: torch.Tensor
    places: Places
    missing: torch.Tensor
    """Whether each range of a sample is beyond the end of its file."""
    runs: torch.Tensor
    """Which of the engine's reads has each range."""
    starts: torch.Tensor
    """First byte of each range in the memory."""
    memory: torch.Tensor
    future: Future | None

    def wait(self) -> None:
        """Wait until the read has ended, with or without an error. Ctrl-C interrupts the waiting."""
        if self.future is not None:
            self.future.exception()

    def samples(self, skip: Skipped | None) -> Iterator[tuple[int, Any]]:
        """Wait for the read, and yield the number of each sample and the sample. Tensors keep the batch's memory alive.

        Args:
            skip: Called with the error of each sample that is left out; None to raise the first error.

        Raises:
            SampleUnreadable: For a sample that could not be read, or is damaged.
        """
        sound = self._sound(skip)
        if self.layout.sample_bytes is not None:
            stacked = self.layout.stacked(self.memory, self.starts[sound], None)
            yield from zip(self.numbers[sound].tolist(), _unstacked(stacked), strict=True)
            return
        memory = memory_of(self.memory) if self.memory.nbytes else memoryview(b"")
        starts, lengths = self.starts.tolist(), self.places.nbytes.tolist()
        ends, shared = 0, set()
        for index in self.starts.argsort(stable=True).tolist():
            if starts[index] < ends:
                shared.add(index)
            ends = max(ends, starts[index] + lengths[index])
        for index, number in zip(sound.tolist(), self.numbers[sound].tolist(), strict=True):
            ranges = range(index * self.layout.ranges, (index + 1) * self.layout.ranges)
            data = [memory[starts[at] : starts[at] + lengths[at]] for at in ranges]
            owned = (memoryview(bytearray(each)) if at in shared else each for at, each in zip(ranges, data, strict=True))
            try:
                sample = self.layout.sample(number, *owned)
            except (LookupError, RuntimeError, ValueError) as error:
                self._report(ranges[0], error, skip)
            else:
                yield number, sample

    def stacked(self, empty: Empty, skip: Skipped | None) -> tuple[int, Any]:
        """Wait for the read; return how many samples could be read, and these as a batch. For layouts with ``sample_bytes``.

        Arguments and errors are those of :meth:`samples`.
        """
        sound = self._sound(skip)
        return len(sound), self.layout.stacked(self.memory, self.starts[sound], empty)

    def _sound(self, skip: Skipped | None) -> torch.Tensor:
        """Wait for the read, and return the indices of the samples that can be read, or raise the first error."""
        errors = self._errors()
        first = {index // self.layout.ranges: index for index in sorted(errors, reverse=True)}
        for index in sorted(first.values()):
            self._report(index, errors[index], skip)
        whole = torch.ones(len(self.numbers), dtype=torch.bool)
        whole[list(first)] = False
        return whole.nonzero().flatten()

    def _errors(self) -> dict[int, Exception]:
        """Return why samples could not be read, by the indices of their ranges."""
        errors: dict[int, Exception] = {}

        def add(wrong: torch.Tensor, error: Exception) -> None:
            """Note an error for the ranges where ``wrong`` is true, unless they have one already."""
            for index in wrong.nonzero().flatten().tolist():
                errors.setdefault(index, error)

        failed = None if self.future is None else self.future.exception()
        places, layout = self.places, self.layout
        if layout.versions:
            for file in distinct(places.files):
                if is_replaced(layout.files[file], layout.versions[file]):
                    changed = "the file was changed since it was opened: open the dataset again"
                    add(places.files == file, OSError(errno.ESTALE, changed))
        if failed is not None:
            runs = getattr(failed, "indices", distinct(self.runs))
            add(torch.isin(self.runs, torch.tensor(runs)), failed)
        add(self.missing, OSError(errno.EBADMSG, "the file ends before it"))
        if layout.sample_bytes is not None:
            add(places.nbytes < layout.sample_bytes, ValueError(f"its columns have {layout.sample_bytes} bytes"))
        if places.checksums is not None:
            lengths = places.nbytes.clone()
            lengths[list(errors)] = 0
            for index in crc32_mismatches(self.memory, self.starts, lengths, places.checksums):
                errors.setdefault(index, ValueError(f"its CRC-32 is not {int(places.checksums[index])}"))
        return errors

    def _report(self, index: int, error: Exception, skip: Skipped | None) -> None:
        """Raise the error of a range of a sample as SampleUnreadable, or pass it to ``skip``."""
        file, offset = self.layout.files[int(self.places.files[index])], int(self.places.offsets[index])
        if not isinstance(error, OSError):
            error = OSError(errno.EBADMSG, f"it is damaged: {error}")
        number = int(self.numbers[index // self.layout.ranges])
        text = f"sample {number}, {int(self.places.nbytes[index])} bytes at offset {offset}: {error.strerror}"
        unreadable = SampleUnreadable(error.errno, text, os.fspath(file))
        unreadable.sample, unreadable.offset = number, offset
        if skip is None:
            raise unreadable from error
        skip(unreadable)


def _unstacked(stacked: Any) -> list[Any]:
    """Return the samples of a batch: of a tensor, or of a dict of tensors."""
    if isinstance(stacked, torch.Tensor):
        return list(stacked.unbind())
    return [dict(zip(stacked, row, strict=True)) for row in zip(*(column.unbind() for column in stacked.values()), strict=True)]
