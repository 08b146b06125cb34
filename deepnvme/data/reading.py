"""Samples by number -> ranges of files, one engine call into memory that the batch owns -> samples, or an error that names one.

A batch takes a fixed number of tensor operations, whatever its size. Python runs for each range that is read, and for each sample
only if samples have columns of variable length.
"""

from __future__ import annotations

import contextlib
import errno
import operator
import os
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch.utils.data import Dataset

from deepnvme.checkpoint.file_io import is_replaced
from deepnvme.drives.aio_config import AioConfig
from deepnvme.drives.profiles import engine_for
from deepnvme.engine import File, Future
from deepnvme.memory.alignment import padded
from deepnvme.memory.host import empty_aligned
from deepnvme.memory.pool import BufferPool, OutOfBuffers, buffer_pool
from deepnvme.memory.tensor_bytes import crc32_mismatches, memory_of
from deepnvme.telemetry.descriptions import path_list, representation

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

OnError = Literal["raise", "skip"]
Skipped = Callable[[SampleUnreadable], object]


def group_runs(places: Places, sector: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Group samples that follow one another in the batch and in a file into runs, which begin and end at sectors.

    Samples of a run do not share bytes. Those that lie in another order than in the batch are read alone, as in a random order
    nearly all are.

    Returns:
        Of each run: where it begins and ends in its file, and the index of the sample with which it begins. Then the index of
        the run of each sample. int64 tensors.
    """
    ends = places.offsets + places.nbytes
    gaps = places.offsets[1:] - ends[:-1]
    apart = torch.ones(len(ends) + 1, dtype=torch.bool)  # whether a run ends before each sample, and after the last one
    apart[1:-1] = (places.files.diff() != 0) | (gaps < 0) | (gaps > _GAP_BYTES) | ((places.offsets // _RUN_BYTES).diff() != 0)
    first, last = apart[:-1].nonzero().flatten(), apart[1:].nonzero().flatten()
    begins = places.offsets[first] // sector * sector
    return begins, (ends[last] + sector - 1) // sector * sector, first, apart[:-1].cumsum(0) - 1


@dataclass(eq=False)
class BatchRead:
    """A read of a batch in progress."""

    layout: Layout
    numbers: torch.Tensor
    places: Places
    runs: torch.Tensor
    """Which of the engine's reads has each range."""
    starts: torch.Tensor
    """First byte of each range in the memory."""
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
                ranges = (memory[starts[at] : ends[at]] for at in range(index, len(starts), len(numbers)))
                sample = self.layout.sample(numbers[index], *ranges)
            except (LookupError, RuntimeError, TypeError, ValueError) as error:
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
        if failed is not None:
            runs = torch.tensor(getattr(failed, "indices", distinct(self.runs)))
            errors |= dict.fromkeys(torch.isin(self.runs, runs).nonzero().flatten().tolist(), failed)
        for file in distinct(places.files) if layout.versions else []:
            if is_replaced(layout.files[file], layout.versions[file]):
                changed = OSError(errno.ESTALE, "the file was changed since it was opened: open the dataset again")
                errors |= dict.fromkeys((places.files == file).nonzero().flatten().tolist(), changed)
        if places.checksums is not None:
            lengths = places.nbytes.clone()
            lengths[list(errors)] = 0
            for index in crc32_mismatches(self.memory, self.starts, lengths, places.checksums):
                errors.setdefault(index, ValueError(f"its CRC-32 is not {int(places.checksums[index])}"))
        first = {index % len(self.numbers): index for index in sorted(errors, reverse=True)}
        for sample in sorted(first):
            self._report(first[sample], errors[first[sample]])
        sound = torch.ones(len(self.numbers), dtype=torch.bool)
        sound[list(first)] = False
        return sound.nonzero().flatten()

    def _report(self, index: int, error: Exception) -> None:
        """Raise the error of a range as SampleUnreadable, or pass it to ``skip``."""
        file, offset = self.layout.files[int(self.places.files[index])], int(self.places.offsets[index])
        if not isinstance(error, OSError):
            error = OSError(errno.EBADMSG, f"it is damaged: {error}")
        number = int(self.numbers[index % len(self.numbers)])
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


def _memory(nbytes: int, pool: BufferPool | None, only_leased: bool) -> torch.Tensor:
    """Return memory for a batch, aligned to pages. It belongs to the tensors over it."""
    step = max(1 << max(nbytes.bit_length() - 4, 0), 4096)  # batches differ by some percent: sizes that occur again
    lease = None if pool is None else pool.try_lease(padded(nbytes, step))
    if lease is None and only_leased:
        raise OutOfBuffers(f"a batch needs {nbytes} bytes")
    # the lease ends at once, its memory is lent until no view is left
    return (empty_aligned(padded(nbytes)) if lease is None else lease.buffer)[:nbytes]


class _OpenFiles:
    """The engine of a dataset, and the files that it has opened, in one process. Thread-safe."""

    def __init__(self, layout: Layout, aio_config: AioConfig | None) -> None:
        self.process = os.getpid()
        directories = {path.parent for path in layout.files} or ["."]
        self.engine = engine_for(directories, aio_config)
        self._index_engine = engine_for(directories, aio_config)  # entries of an index do not wait behind samples
        self._open = lru_cache(_OPEN_FILES)(partial(self.engine.open, whole_sectors=True))  # closed with the last reference
        self._open_index = lru_cache(_OPEN_FILES)(self._index_engine.open)
        self._indexes: dict[Path, torch.Tensor] = {}

    def opened(self, paths: list[Path]) -> list[File]:
        """Return open files. Raises OSError."""
        with contextlib.suppress(OSError):
            return [self._open(path) for path in paths]
        self._open.cache_clear()  # closes files that no batch in progress needs, if the process may open no more
        try:
            return [self._open(path) for path in paths]
        except OSError as error:
            if error.errno == errno.EMFILE:
                error.strerror = f"the samples are in {len(paths)} files, which exceeds the limit of open files (ulimit -n)"
            raise

    def records(self, path: Path, numbers: torch.Tensor, words: int) -> torch.Tensor:
        """Return records of an index. Blocks. Raises OSError; CorruptSamples if the index ends before one of them."""
        file, kept = self._open_index(path), self._indexes.get(path)
        count = file.size() // (8 * words)
        if len(missing := numbers[numbers >= count]):
            raise CorruptSamples(path, f"it ends before its entry {int(missing[0])}")
        if kept is None and file.size() + sum(each.nbytes for each in self._indexes.values()) <= _INDEX_BYTES:
            kept = torch.empty((count, words), dtype=torch.int64)
            self._index_engine.read(kept, file).result()
            self._indexes[path] = kept
        if kept is not None:
            return kept[numbers]
        found = torch.empty((len(numbers), words), dtype=torch.int64)
        self._index_engine.gather(file, numbers, found).result()
        return found


class StoredSamples(Dataset[Any]):
    """Samples of a layout, read by number.

    Usable in threads, in forked children, and pickled: a worker of torch's DataLoader opens the files again when it first reads.
    """

    _files: _OpenFiles | None = None

    def __init__(self, layout: Layout, errors: OnError, aio_config: AioConfig | None) -> None:
        if errors not in ("raise", "skip"):
            raise ValueError(f'errors must be "raise" or "skip", got {errors!r}')
        self._layout, self._errors, self._config = layout, errors, aio_config
        self.skipped = 0
        """Number of unreadable samples that were left out so far, in this process, with ``errors="skip"``."""

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self._layout)

    def __getitem__(self, number: int) -> Any:
        """Read one sample. Blocks.

        Raises:
            IndexError: If there is no such sample.
            SampleUnreadable: If it cannot be read or is damaged, also with ``errors="skip"``.
        """
        read = self.start([number], None)
        read.skip = None
        ((_, sample),) = read.samples()
        return sample

    def __getitems__(self, numbers: Sequence[int]) -> list[Any]:
        """Read several samples by one call of the engine. Blocks.

        Returns:
            The samples in the order of ``numbers``; with ``errors="skip"``, without those that could not be read.

        Raises:
            IndexError: If there is no such sample.
            SampleUnreadable: If a sample cannot be read or is damaged. Not with ``errors="skip"``.
        """
        return [sample for _, sample in self.start(numbers, buffer_pool()).samples()]

    @property
    def stacks(self) -> bool:
        """Whether all samples have the same columns, dtypes and shapes."""
        return self._layout.sample_bytes is not None

    def start(self, numbers: Sequence[int] | torch.Tensor, pool: BufferPool | None, only_leased: bool = False) -> BatchRead:
        """Start reading samples by one call of the engine; return when the reads are submitted. Blocks for an index.

        Args:
            numbers: Numbers of the samples; the same one may occur several times. Negative ones count from the end.
            pool: Leases the memory. Without it, or if it has no memory free, the system's is used.
            only_leased: Whether to raise if the pool has no memory free.

        Raises:
            TypeError, IndexError, OverflowError: If a number is none of a sample.
            OSError: If a file cannot be opened, or an index cannot be read or is damaged.
            OutOfBuffers: If the pool has no memory free, and only leased memory is wanted.
        """
        layout, count = self._layout, len(self)
        if not isinstance(numbers, torch.Tensor):
            numbers = torch.tensor(array("q", map(operator.index, numbers)), dtype=torch.int64)
        wrong = numbers[(numbers < -count) | (numbers >= count)]
        if len(wrong):
            raise IndexError(f"there is no sample {int(wrong[0])}: the dataset has {count}")
        numbers, here = numbers % max(count, 1), self._files_here()
        places = layout.places(numbers, here.records)
        used = distinct(places.files)
        files = here.opened([layout.files[number] for number in used])
        file_of = containing(places.files, torch.tensor(used, dtype=torch.int64)) - 1
        sizes = torch.tensor([file.size() for file in files], dtype=torch.int64)[file_of]
        sector = max((file.sector_size for file in files), default=1)
        begins, ends, first, run = group_runs(places, sector)
        unit = max(sector, _CACHE_LINE)
        spans = (ends - begins + unit - 1) // unit * unit
        starts = (spans.cumsum(0) - spans - begins)[run] + places.offsets
        memory = _memory(int(spans.sum()), pool, only_leased)
        tensors = list(memory.split_with_sizes(spans.tolist()))
        ends = ends.minimum(sizes[first])  # the last sector of a file may be a part of one; or the file was cut off
        begins = begins.minimum(ends)
        for index in (ends - begins != spans).nonzero().flatten().tolist():
            tensors[index], beyond = tensors[index].tensor_split([int(ends[index] - begins[index])])
            beyond.zero_()  # no bytes of an earlier batch, which would pass for those that were cut off
        sources = files[0] if len(files) == 1 else [files[number] for number in file_of[first].tolist()]
        future = here.engine.read_many(tensors, sources, begins.tolist())
        skip = self._count_skipped if self._errors == "skip" else None
        return BatchRead(layout, numbers, places, run, starts, memory, future, skip)

    def _count_skipped(self, error: SampleUnreadable) -> None:
        self.skipped += 1

    def _files_here(self) -> _OpenFiles:
        """Return this process's open files, and begin to open them on first use."""
        if self._files is None or self._files.process != os.getpid():
            self._files = _OpenFiles(self._layout, self._config)
        return self._files

    def close(self) -> None:
        """Close the files once the reads in flight have ended. They are opened again if the dataset is used again. Idempotent."""
        self._files = None  # the engine and its files close with their last reference

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_files"}

    def __repr__(self) -> str:
        return representation(self, lambda: path_list(self._layout.files[:1]), lambda: f"{len(self)} samples")
