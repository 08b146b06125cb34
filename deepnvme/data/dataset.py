"""Map-style datasets whose samples stay on the drive: one engine call for each batch, into memory that the batch owns."""

from __future__ import annotations

import errno
import operator
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import torch
from torch.utils.data import Dataset

from deepnvme.checkpoint.file_io import file_version, is_replaced
from deepnvme.drives.aio_config import AioConfig
from deepnvme.drives.profiles import engine_for
from deepnvme.engine import File, Future
from deepnvme.memory.alignment import padded
from deepnvme.memory.host import empty_aligned
from deepnvme.memory.pool import BufferPool, OutOfBuffers, buffer_pool
from deepnvme.memory.tensor_bytes import memory_of
from deepnvme.ops import load_async_io
from deepnvme.tables.opening import find_layout
from deepnvme.telemetry.descriptions import path_list, representation
from deepnvme.transfer.scatter import Run, runs

from .layouts import Entry, Layout, SampleUnreadable, StridedLayout, TarLayout
from .sample_files import MANIFEST_NAME, WrittenLayout, load_manifest

_OPEN_FILES = 128
"""Most files that stay open. A batch that needs more has them open meanwhile; systems allow 1024 descriptors or more."""
_RUN_BYTES = 4 << 20
"""Most bytes of neighbouring samples that one transfer reads."""
_GAP_BYTES = 4096
"""Most bytes between two samples that are read along with them: headers between samples, and padding."""
_CACHE_LINE = 64

Skipped = Callable[[SampleUnreadable], object]


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
        self._files: dict[int, File] = {}
        self._lock = threading.Lock()

    def start(self, numbers: Sequence[int], pool: BufferPool | None, only_leased: bool = False) -> BatchRead:
        """Start reading samples by one call of the engine; return at once.

        Args:
            numbers: Numbers of the samples, each of them valid; the same one may occur several times.
            pool: Leases the memory. Without it, or if it has no memory free, the system's is used.
            only_leased: Whether to raise if the pool has no memory free.

        Raises:
            OSError: If a file cannot be opened, or an index cannot be read or is damaged.
            OutOfBuffers: If the pool has no memory free, and only leased memory is wanted.
        """
        entries = self.layout.entries(numbers)
        with self._lock:
            files = {number: self._file(number) for number in dict.fromkeys(entry[0] for entry in entries)}
        sizes = {number: file.size() for number, file in files.items()}
        sector = max((file.sector_size for file in files.values()), default=1)
        span = max(sector, _CACHE_LINE)
        found, spans, sources, offsets = [], [], [], []
        for run in runs([entry[:3] for entry in entries], _RUN_BYTES, sector, _GAP_BYTES):
            file = entries[run.members[0]][0]
            if run.end > sizes[file]:  # the last sector of a file may be a part of one; or the file was cut off
                run = run._replace(end=max(sizes[file], run.begin))
            if run.end > run.begin:
                found.append(run)
                spans.append(-(-(run.end - run.begin) // span) * span)
                sources.append(files[file])
                offsets.append(run.begin)
        memory = _memory(sum(spans), pool, only_leased)
        tensors = list(memory.split_with_sizes(spans))
        for index, run in enumerate(found):
            if run.end - run.begin < spans[index]:
                tensors[index] = tensors[index][: run.end - run.begin]
        future = self._engine.read_many(tensors, sources, offsets) if found else None
        return BatchRead(self.layout, list(numbers), entries, sizes, found, spans, memory, future)

    def _file(self, number: int) -> File:
        file = self._files.pop(number, None)
        if file is None:
            while len(self._files) >= _OPEN_FILES:
                self._files.pop(next(iter(self._files)))  # closed with its last reference: a batch may have yet to be started
            file = self._engine.open(self.layout.files[number], "r", whole_sectors=True)
        self._files[number] = file  # the one used last is at the end
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
    numbers: list[int]
    entries: list[Entry]
    sizes: dict[int, int]
    """Bytes of each file when the read was started."""
    runs: list[Run]
    spans: list[int]
    """Bytes of memory for each run."""
    memory: torch.Tensor
    future: Future | None

    def wait(self) -> None:
        """Wait until the read has ended, with or without an error. Ctrl-C interrupts the waiting."""
        if self.future is not None:
            self.future.exception()

    def samples(self, skip: Skipped | None = None) -> Iterator[tuple[int, Any]]:
        """Wait for the read, and yield the number of each sample and the sample. Tensors keep the batch's memory alive.

        Args:
            skip: Called with the error of each sample that is left out; None to raise the first error.

        Raises:
            SampleUnreadable: For a sample that could not be read, or is damaged.
        """
        decode, checksum = self.layout.sample, load_async_io().memory.crc32  # looked up once, and not for each sample
        for index, (number, data) in enumerate(zip(self.numbers, self._pieces(), strict=True)):
            try:
                if isinstance(data, OSError):
                    raise data
                expected = self.entries[index][3]
                if expected >= 0 and (found := checksum(data)) != expected:
                    raise ValueError(f"expected CRC-32 {expected}, found {found}")
                sample = decode(data)
            except (OSError, ValueError, RuntimeError) as error:  # the latter from tensors that have too few bytes
                unreadable = self._unreadable(index, error)
                if skip is None:
                    raise unreadable from error
                skip(unreadable)
            else:
                yield number, sample

    def _pieces(self) -> list[memoryview | OSError]:
        """Wait for the read, and return the bytes of each sample, or why it could not be read."""
        memory = memory_of(self.memory) if self.memory.nbytes else memoryview(b"")
        missing = OSError(errno.EBADMSG, "the file ends before it")
        pieces: list[memoryview | OSError] = [missing if nbytes else memory[:0] for _, _, nbytes, _ in self.entries]
        failed = None if self.future is None else self.future.exception()
        failures = () if failed is None else getattr(failed, "indices", range(len(self.runs)))
        for run, end, span in zip(self.runs, accumulate(self.spans), self.spans, strict=True):
            base = end - span - run.begin
            last = run.begin
            for index in run.members:
                file, offset, nbytes, _ = self.entries[index]
                if offset + nbytes <= self.sizes[file]:
                    piece = memory[base + offset : base + offset + nbytes]
                    pieces[index] = memoryview(bytearray(piece)) if offset < last else piece  # no two samples share bytes
                    last = max(last, offset + nbytes)
        for index in (index for at in failures for index in self.runs[at].members):
            pieces[index] = failed or pieces[index]
        if self.layout.versions:
            files, versions = self.layout.files, self.layout.versions
            stale = {file for file in {entry[0] for entry in self.entries} if is_replaced(files[file], versions[file])}
            changed = OSError(errno.ESTALE, "the file was changed since it was opened: open the dataset again")
            pieces = [changed if entry[0] in stale else piece for entry, piece in zip(self.entries, pieces, strict=True)]
        return pieces

    def _unreadable(self, index: int, error: Exception) -> SampleUnreadable:
        file, offset, nbytes, _ = self.entries[index]
        if not isinstance(error, OSError):
            error = OSError(errno.EBADMSG, f"it is damaged: {error}")
        text = f"sample {self.numbers[index]}, {nbytes} bytes at offset {offset}: {error.strerror}"
        unreadable = SampleUnreadable(error.errno, text, os.fspath(self.layout.files[file]))
        unreadable.sample, unreadable.offset = self.numbers[index], offset
        return unreadable


OnError = Literal["raise", "skip"]


class StoredSamples(Dataset[Any]):
    """Samples of a layout, read by number.

    Usable in threads, in forked children, and pickled: a worker of torch's DataLoader opens the files again when it first reads.
    """

    _reader: SampleReader | None = None

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
        ((_, sample),) = self.start([number], None).samples()
        return sample

    def __getitems__(self, numbers: Sequence[int]) -> list[Any]:
        """Read several samples by one call of the engine. Blocks.

        Returns:
            The samples in the order of ``numbers``; with ``errors="skip"``, without those that could not be read.

        Raises:
            IndexError: If there is no such sample.
            SampleUnreadable: If a sample cannot be read or is damaged. Not with ``errors="skip"``.
        """
        return [sample for _, sample in self.samples_of(self.start(numbers, buffer_pool()))]

    def samples_of(self, read: BatchRead) -> Iterator[tuple[int, Any]]:
        """Wait for a read of :meth:`start`, and yield number and sample, for samples as :meth:`__getitems__` returns them."""
        return read.samples(self._skip if self._errors == "skip" else None)

    def start(self, numbers: Sequence[int], pool: BufferPool | None, only_leased: bool = False) -> BatchRead:
        """Start reading samples; return at once. Negative numbers count from the end.

        Raises TypeError and IndexError for a number that is none of a sample, and as :meth:`SampleReader.start`.
        """
        indices, count = list(map(operator.index, numbers)), len(self._layout)
        for index in indices:
            if not -count <= index < count:
                raise IndexError(f"there is no sample {index}: the dataset has {count}")
        return self._reader_here().start([index % count for index in indices], pool, only_leased)

    def _skip(self, error: SampleUnreadable) -> None:
        self.skipped += 1

    def _reader_here(self) -> SampleReader:
        """Return this process's reader, and make one on first use."""
        if self._reader is None or self._reader.process != os.getpid():
            self._reader = SampleReader(self._layout, self._config)
        return self._reader

    def close(self) -> None:
        """Close the files once the reads in flight have ended. They are opened again if the dataset is used again. Idempotent."""
        self._reader = None  # the engine and its files close with their last reference

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_reader"}

    def __repr__(self) -> str:
        return representation(self, lambda: path_list(self._layout.files[:1]), lambda: f"{len(self)} samples")


class SampleDataset(StoredSamples):
    """Samples on the drive, each of which is read alone, wherever it lies: a map-style dataset for random order.

    For torch's DataLoader, samplers, Lightning and Trainer it is an ordinary dataset; a batch is one call of the engine. With
    :class:`DataLoader` of this package, batches are also read ahead.

    A sample is what the format says:

    | path | a sample |
    |---|---|
    | directory of `SampleWriter` | a dict by column: bytes, str, tensors |
    | `.npy`, `.safetensors` | a row of the tensor: a tensor |
    | `.tar` of WebDataset | a dict: `"__key__"`, and bytes by extension |

    Tensors may be views of memory that all samples of a batch share, and keep it alive.

    Args:
        path: File or directory; or a list of tar files, whose samples follow one another.
        name: Name of the tensor, in a safetensors file with several.
        errors: "raise", or "skip" to leave unreadable samples out of batches, and count them in :attr:`skipped`.
        aio_config: Settings of the engine; None for the profile of the drive.

    Raises:
        FileNotFoundError: If there is no such file or directory.
        OSError: If a header, an index or a manifest is damaged (``CorruptSamples``, ``CorruptTable``) or cannot be read.
        ValueError: If the format is not one of the table's, or an argument is wrong.
    """

    def __init__(
        self, path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], *, name: str | None = None,
        errors: OnError = "raise", aio_config: AioConfig | None = None,
    ) -> None:  # fmt: skip
        paths = [path] if isinstance(path, str | os.PathLike) else list(path)
        super().__init__(_open_layout([Path(each).absolute() for each in paths], name), errors, aio_config)


class TokenDataset(StoredSamples):
    """Windows of a file of tokens, such as nanoGPT's ``train.bin``: sample i is ``length`` tokens from token ``i * stride`` on.

    Args:
        path: The file: numbers without a header.
        dtype: Dtype of a token.
        length: Tokens of a sample.
        stride: Tokens between the beginnings of two samples; None for ``length``. With 1, every window is a sample.
        offset: Bytes from the start of the file to the first token.
        errors: As for :class:`SampleDataset`.
        aio_config: Settings of the engine; None for the profile of the drive.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If ``length`` or ``stride`` is below 1, ``offset`` is negative, or the file is shorter than one window.
    """

    def __init__(
        self, path: str | os.PathLike[str], dtype: torch.dtype, length: int, stride: int | None = None, *, offset: int = 0,
        errors: OnError = "raise", aio_config: AioConfig | None = None,
    ) -> None:  # fmt: skip
        stride = length if stride is None else stride
        if length < 1 or stride < 1 or offset < 0:
            raise ValueError(f"length and stride must be at least 1, and offset 0, got {length}, {stride} and {offset}")
        file = Path(path).absolute()
        version = file_version(file)
        tokens = (file.stat().st_size - offset) // dtype.itemsize
        if tokens < length:
            raise ValueError(f"'{path}' has {max(tokens, 0)} tokens of {dtype} from {offset} on, and a window has {length}")
        samples = (tokens - length) // stride + 1
        windows = StridedLayout(file, version, dtype, (length,), offset, stride * dtype.itemsize, samples)
        super().__init__(windows, errors, aio_config)


def _open_layout(paths: Sequence[Path], name: str | None) -> Layout:
    """Return the samples in files, or in a directory. Blocks while headers or an index are read. Raises as SampleDataset."""
    if not paths:
        raise ValueError("a dataset needs a path")
    path, suffix = paths[0], paths[0].suffix
    version = file_version(path)  # raises FileNotFoundError
    if name is not None and suffix != ".safetensors":
        raise ValueError(f"'{path}' has no tensors with names, got name={name!r}")
    if all(each.suffix == ".tar" for each in paths):
        return TarLayout(paths)
    if len(paths) > 1:
        raise ValueError(f"a list of paths is for .tar files, got '{path}' and others: merge_samples joins directories")
    if suffix in (".npy", ".safetensors"):
        rows = find_layout(path, name, None, None, 0)
        shard, values = rows.shards[0], rows.values
        return StridedLayout(shard.path, version, values.dtype, values.shape, shard.base, rows.record_bytes, rows.rows)
    if (path / MANIFEST_NAME).exists():
        return WrittenLayout(path, load_manifest(path))
    raise ValueError(f"'{path}' is neither a directory of SampleWriter nor a .tar, .npy or .safetensors file")
