"""Reads of batches: samples by number -> ranges of files, one engine call, and samples or errors that name the sample.

A batch takes a fixed number of tensor operations, whatever its size. Python runs for each range that is read, and for each sample
only if samples have columns of variable length.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
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

from .layouts import CorruptSamples, Empty, Layout, Places, SampleUnreadable, containing, distinct

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
    """Ranges of files that are read, and which of them has each sample. int64 tensors."""

    begins: torch.Tensor
    ends: torch.Tensor
    first: torch.Tensor
    """Index of the sample with which each run begins."""
    of: torch.Tensor
    """Index of the run of each sample."""


def group_runs(places: Places, sector: int) -> Runs:
    """Group samples that follow one another in the batch and in a file into runs, which begin and end at sectors.

    Samples of a run do not share bytes. Those that lie in another order than in the batch are read alone, as in a random order
    nearly all are.
    """
    ends = places.offsets + places.nbytes
    gaps = places.offsets[1:] - ends[:-1]
    apart = torch.ones(len(ends) + 1, dtype=torch.bool)  # whether a run ends before each sample, and after the last one
    apart[1:-1] = (places.files.diff() != 0) | (gaps < 0) | (gaps > _GAP_BYTES) | ((places.offsets // _RUN_BYTES).diff() != 0)
    first, last = apart[:-1].nonzero().flatten(), apart[1:].nonzero().flatten()
    begins = places.offsets[first] // sector * sector
    return Runs(begins, (ends[last] + sector - 1) // sector * sector, first, apart[:-1].cumsum(0) - 1)


class SampleReader:
    """The engine and the open files of a layout, in one process. Thread-safe.

    Args:
        layout: Where the samples are.
        aio_config: Settings of the engine; None for the profile of the drive.
    """

    def __init__(self, layout: Layout, aio_config: AioConfig | None) -> None:
        self.layout = layout
        self.process = os.getpid()
        directories = {path.parent for path in layout.files} or ["."]
        self._engine = engine_for(directories, aio_config)
        self._index_engine = engine_for(directories, aio_config)  # entries of an index do not wait behind samples
        self._open = lru_cache(_OPEN_FILES)(partial(self._engine.open, whole_sectors=True))  # closed with the last reference
        self._open_index = lru_cache(_OPEN_FILES)(self._index_engine.open)
        self._indexes: dict[Path, torch.Tensor] = {}

    def start(self, numbers: torch.Tensor, pool: BufferPool | None, only_leased: bool, skip: Skipped | None) -> BatchRead:
        """Start reading samples by one call of the engine; return when the reads are submitted. Blocks for an index.

        Args:
            numbers: Numbers of the samples, int64, each of them valid; the same one may occur several times.
            pool: Leases the memory. Without it, or if it has no memory free, the system's is used.
            only_leased: Whether to raise if the pool has no memory free.
            skip: Called with the error of each sample that is left out; None to raise the first error.

        Raises:
            OSError: If a file cannot be opened, or an index cannot be read or is damaged.
            OutOfBuffers: If the pool has no memory free, and only leased memory is wanted.
        """
        places = self.layout.places(numbers, self._records)
        used = distinct(places.files)
        files = self._opened(used)
        file_of = containing(places.files, torch.tensor(used, dtype=torch.int64)) - 1
        sizes = torch.tensor([file.size() for file in files], dtype=torch.int64)[file_of]
        sector = max((file.sector_size for file in files), default=1)
        begins, ends, first, run = group_runs(places, sector)
        ends = ends.minimum(sizes[first])  # the last sector of a file may be a part of one; or the file was cut off
        begins = begins.minimum(ends)
        unit = max(sector, _CACHE_LINE)
        spans = (ends - begins + unit - 1) // unit * unit
        starts = spans.cumsum(0) - spans
        memory = _memory(int(spans.sum()), pool, only_leased)
        tensors = list(memory.split_with_sizes(spans.tolist()))
        for index in (ends - begins != spans).nonzero().flatten().tolist():
            tensors[index] = tensors[index][: int(ends[index] - begins[index])]
        sources = files[0] if len(files) == 1 else [files[number] for number in file_of[first].tolist()]
        future = self._engine.read_many(tensors, sources, begins.tolist())
        missing = places.offsets + places.nbytes > sizes
        in_memory = (starts - begins)[run] + places.offsets
        return BatchRead(self.layout, numbers, places, missing, run, in_memory, memory, future, skip)

    def _records(self, path: Path, numbers: torch.Tensor, words: int) -> torch.Tensor:
        """Read records of an index. Blocks. Raises OSError; CorruptSamples if the index ends before one of them."""
        file, index = self._open_index(path), self._indexes.get(path)
        count = file.size() // (8 * words)
        if len(missing := numbers[numbers >= count]):
            raise CorruptSamples(path, f"it ends before its entry {int(missing[0])}")
        if index is None and file.size() + sum(each.nbytes for each in self._indexes.values()) <= _INDEX_BYTES:
            index = torch.empty((count, words), dtype=torch.int64)
            self._index_engine.read(index, file).result()
            self._indexes[path] = index
        if index is not None:
            return index[numbers]
        found = torch.empty((len(numbers), words), dtype=torch.int64)
        self._index_engine.gather(file, numbers, found).result()
        return found

    def _opened(self, numbers: list[int]) -> list[File]:
        """Return files by their numbers in the layout."""
        with contextlib.suppress(OSError):
            return [self._open(self.layout.files[number]) for number in numbers]
        self._open.cache_clear()  # closes files that no batch in progress needs, if the process may open no more
        try:
            return [self._open(self.layout.files[number]) for number in numbers]
        except OSError as error:
            if error.errno == errno.EMFILE:
                error.strerror = f"the samples are in {len(numbers)} files, which exceeds the limit of open files (ulimit -n)"
            raise


def _memory(nbytes: int, pool: BufferPool | None, only_leased: bool) -> torch.Tensor:
    """Return memory for a batch, aligned to pages. It belongs to the tensors over it."""
    step = max(1 << max(nbytes.bit_length() - 4, 0), 4096)  # batches differ by some percent: sizes that occur again
    lease = None if pool is None else pool.try_lease(padded(nbytes, step))
    if lease is None and only_leased:
        raise OutOfBuffers(f"a batch needs {nbytes} bytes")
    # the lease ends at once, its memory is lent until no view is left
    return (empty_aligned(padded(nbytes)) if lease is None else lease.buffer)[:nbytes]


@dataclass(eq=False)
class BatchRead:
    """A read of a batch in progress."""

    layout: Layout
    numbers: torch.Tensor
    places: Places
    missing: torch.Tensor
    """Whether each sample is beyond the end of its file."""
    runs: torch.Tensor
    """Which of the engine's reads has each sample."""
    starts: torch.Tensor
    """First byte of each sample in the memory."""
    memory: torch.Tensor
    future: Future
    skip: Skipped | None
    """Called with the error of each sample that is left out; None to raise the first error."""

    def samples(self) -> Iterator[tuple[int, Any]]:
        """Wait for the read, and yield the number of each sample and the sample. Tensors keep the batch's memory alive.

        Raises:
            SampleUnreadable: For a sample that could not be read, or is damaged.
        """
        sound = self._sound()
        if self.layout.sample_bytes is not None:  # half the time of decoding one by one
            stacked = self.layout.stacked(self.memory, self.starts[sound], None)
            yield from zip(self.numbers[sound].tolist(), _unstacked(stacked), strict=True)
            return
        memory = memory_of(self.memory) if self.memory.nbytes else memoryview(b"")
        starts, ends, numbers = (each.tolist() for each in (self.starts, self.starts + self.places.nbytes, self.numbers))
        for index in sound.tolist():
            try:
                sample = self.layout.sample(memory[starts[index] : ends[index]])
            except ValueError as error:
                self._report(index, error)
            else:
                yield numbers[index], sample

    def stacked(self, empty: Empty) -> tuple[int, Any]:
        """Wait for the read; return how many samples could be read, and these as a batch, collated into what ``empty`` returns.

        For layouts with ``sample_bytes``. Errors are those of :meth:`samples`.
        """
        sound = self._sound()
        return len(sound), self.layout.stacked(self.memory, self.starts[sound], empty)

    def _sound(self) -> torch.Tensor:
        """Wait for the read, and return the indices of the samples that could be read. Raises or skips errors of the others."""
        failed, places, layout = self.future.exception(), self.places, self.layout
        errors: dict[int, Exception] = {}

        def add(wrong: torch.Tensor, error: Exception) -> None:
            """Note an error for the samples where ``wrong`` is true, unless they have one already."""
            errors.update(dict.fromkeys(wrong.nonzero().flatten().tolist(), error) | errors)

        for file in distinct(places.files) if layout.versions else []:
            if is_replaced(layout.files[file], layout.versions[file]):
                changed = "the file was changed since it was opened: open the dataset again"
                add(places.files == file, OSError(errno.ESTALE, changed))
        if failed is not None:
            runs = getattr(failed, "indices", distinct(self.runs))
            add(torch.isin(self.runs, torch.tensor(runs)), failed)
        add(self.missing, OSError(errno.EBADMSG, "the file ends before it"))
        if places.checksums is not None:
            lengths = places.nbytes.clone()
            lengths[list(errors)] = 0
            for index in crc32_mismatches(self.memory, self.starts, lengths, places.checksums):
                errors.setdefault(index, ValueError(f"its CRC-32 is not {int(places.checksums[index])}"))
        for index in sorted(errors):
            self._report(index, errors[index])
        sound = torch.ones(len(self.numbers), dtype=torch.bool)
        sound[list(errors)] = False
        return sound.nonzero().flatten()

    def _report(self, index: int, error: Exception) -> None:
        """Raise the error of a sample as SampleUnreadable, or pass it to ``skip``."""
        file, offset = self.layout.files[int(self.places.files[index])], int(self.places.offsets[index])
        if not isinstance(error, OSError):
            error = OSError(errno.EBADMSG, f"it is damaged: {error}")
        number = int(self.numbers[index])
        text = f"sample {number}, {int(self.places.nbytes[index])} bytes at offset {offset}: {error.strerror}"
        unreadable = SampleUnreadable(error.errno, text, os.fspath(file))
        unreadable.sample, unreadable.offset = number, offset
        if self.skip is None:
            raise unreadable from error
        self.skip(unreadable)


def _unstacked(stacked: Any) -> list[Any]:
    """Return the samples of a batch: of a tensor, or of a dict of tensors."""
    if isinstance(stacked, torch.Tensor):
        return list(stacked.unbind())
    return [dict(zip(stacked, row, strict=True)) for row in zip(*(column.unbind() for column in stacked.values()), strict=True)]
