"""Read and write checkpoint files, with shared engines, and notice if a file is replaced while it is read."""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch

from deepnvme.drives.profiles import create_engine, settings_for
from deepnvme.engine import Engine, File, Future
from deepnvme.files.replacing import with_filename
from deepnvme.memory.alignment import PAGE
from deepnvme.memory.host import huge_pages, populate_huge_pages, prefault
from deepnvme.memory.pool import BufferPool
from deepnvme.memory.tensor_bytes import flat_bytes
from deepnvme.telemetry.progress import Progress, count_bytes
from deepnvme.transfer.gather import CHUNK, DIRECT_FROM, ChunkRing, Transfers
from deepnvme.transfer.scatter import Run, runs, scatter, transfer_ahead

from .formats.file_image import FileImage, Source, WriteRange, add_checksums
from .formats.pt_records import CorruptCheckpoint
from .formats.sharding import Span

if TYPE_CHECKING:
    from deepnvme.drives.aio_config import AioConfig
    from deepnvme.ops.aio.async_io_op.checkpoint import Checksums

Result = TypeVar("Result")
_GAP = 64 << 10
"""Largest gap in bytes between two pieces that is read along with them, so that one read has both."""
_MOST_ENGINES = 16
"""Most engines that a process keeps: enough for a server whose drives all have different profiles. Each has threads."""
Path = str | os.PathLike[str]
Version = tuple[int, ...]
"""Identifies the contents of a path: unchanged as long as nobody replaces the file or writes into it."""


def shared_engine(path: Path, aio_config: AioConfig | None = None) -> Engine:
    """Return this process's engine for a file or directory, created on first use. A forked child gets its own engines.

    Files that get the same settings share an engine. The 16 engines used last are kept; any other ends when its last user
    has released it. Looking up the drive takes 0.1 ms, so callers with many files in one directory call this once for the
    directory.

    Args:
        path: The file or directory that is to be read or written. It may not exist yet. A symbolic link is followed.
        aio_config: Settings of the engine; None for the profile of the drive, see :func:`deepnvme.engine_for`.

    Raises:
        TypeError: If ``aio_config`` is not an AioConfig.
        OSError: If the path cannot be reached, naming it; or if the kernel refuses the backend that ``aio_config`` names.
        RuntimeError: If the op cannot be built.
    """
    with with_filename(path, instead=True):
        settings = settings_for([path], aio_config)
    return _engines_of(os.getpid())(settings, aio_config is not None)


@functools.lru_cache(maxsize=1)
def _engines_of(process: int) -> Callable[[AioConfig, bool], Engine]:
    """Return a cached ``create_engine`` for this process, called with the settings and whether the user has given them."""
    return functools.lru_cache(maxsize=_MOST_ENGINES)(create_engine)


# Writing.


def write(
    image: FileImage,
    file: File,
    engine: Engine,
    pool: BufferPool,
    parts: Sequence[Span] | None = None,
    progress: Progress | None = None,
) -> None:
    """Write a file image, or parts of it, into a file. Blocks until everything is written.

    At most 16 MiB are leased at a time. Ends of parts that are not page-aligned are written through the page cache. If
    the whole file is written, the image's checksums are computed meanwhile.

    Args:
        image: Bytes of the file.
        file: File to write to.
        engine: Engine that does the transfers.
        pool: Pool of the buffers in which small pieces are gathered.
        parts: Ranges of the file to write, each (begin, end) in bytes. None is the whole file.
        progress: Called with (bytes written, bytes to write).

    Raises:
        OutOfBuffers: If the pool's budget does not allow a buffer.
        OSError: The first error of a transfer, after all started transfers have ended.
    """
    checksums = image.checksums if parts is None else None
    if parts is None:
        parts = [(0, image.nbytes)]
    start = engine.write
    under_way = Transfers(ended=count_bytes(progress, sum(end - begin for begin, end in parts)))
    ring = ChunkRing(pool, min(CHUNK, sum(end - begin + PAGE for begin, end in parts)), wait=True)

    def write_copied(part: WriteRange) -> None:
        """Gather small pieces in pinned memory, add the checksums that are known by now, and start writing the memory."""
        tensor = ring.memory(part.begin, part.end)
        assert tensor is not None  # because the ring waits for the pool
        image.copy(part.begin, part.end, tensor)
        if checksums is not None:
            add_checksums(checksums, part.begin, tensor)
        ring.sent([under_way.start(start, tensor, file, part.begin)])

    # Checksums are computed in the order of the file, and stand behind their tensors. Tensors further on are started before, so
    # that the drive has work where the processor is busy otherwise. benchmarks/checkpoint.py --only checksums compares both.
    behind: deque[WriteRange] = deque()
    ahead = 0  # bytes of tensors that were started, and of which there is no checksum yet
    try:
        for part in itertools.chain.from_iterable(itertools.starmap(image.ranges, parts)):
            if part.tensor is not None:
                under_way.start(start, part.tensor, file, part.begin)
                ahead += part.end - part.begin if checksums is not None else 0
            behind.append(part)
            while behind and (behind[0].tensor is None or checksums is None or ahead > _AHEAD):
                ahead -= _finish(behind.popleft(), checksums, write_copied)
            under_way.take_ended()
        while behind:
            _finish(behind.popleft(), checksums, write_copied)
        under_way.result()
    finally:
        under_way.exception()  # the caller may change the memory after this returns
        ring.release()


_AHEAD = 128 << 20
"""Most bytes of tensors whose writes start before their checksums are computed, unless one tensor is larger."""


def _finish(part: WriteRange, checksums: Checksums | None, write_copied: Callable[[WriteRange], None]) -> int:
    """Compute the checksums of a tensor's range, or start writing a range of gathered pieces, in the order of the file.

    Returns the bytes of the tensor whose checksums were computed; 0 for gathered pieces or without checksums.
    """
    if part.tensor is None:
        write_copied(part)
    elif checksums is not None:
        add_checksums(checksums, part.begin, part.tensor)
        return part.end - part.begin
    return 0


# Reading.


class FileSlice(NamedTuple):
    """Memory, and the offset in the file of the bytes to fill it with."""

    offset: int
    """Bytes from the start of the file."""
    memory: Source
    """A storage, or a contiguous tensor."""

    @property
    def nbytes(self) -> int:
        """Size of the memory in bytes."""
        return self.memory.nbytes() if isinstance(self.memory, torch.UntypedStorage) else self.memory.nbytes


def memory_for(nbytes: int, offset: int) -> torch.UntypedStorage:
    """Return new CPU memory into which a direct read from ``offset`` of a file needs no copy.

    Args:
        nbytes: Size in bytes. From DIRECT_FROM bytes on, the memory is an anonymous mapping, with huge pages where the
            kernel has them.
        offset: Bytes from the start of the file. The memory begins at the same distance from a page boundary.
    """
    return empty_storage(nbytes) if nbytes < DIRECT_FROM else huge_pages(nbytes, offset % PAGE).untyped_storage()


def empty_storage(nbytes: int, device: torch.device | str = "cpu") -> torch.UntypedStorage:
    """Return a new storage of this many bytes, not initialised."""
    return torch.UntypedStorage(nbytes, device=device)  # type: ignore[no-untyped-call]


def read(placed: Sequence[FileSlice], path: Path, engine: Engine, pool: BufferPool, progress: Progress | None = None) -> None:
    """Fill memory with bytes from a file. Blocks. Leases at most 16 MiB at a time.

    Args:
        placed: Memory on the CPU or CUDA devices, each piece with the offset of its bytes in the file.
        path: The file.
        engine: Engine that does the transfers.
        pool: Pool of the chunks that small pieces are read through.
        progress: Called with (bytes read, bytes to read).

    Raises:
        CorruptCheckpoint: If the file ends before the last byte of a piece.
        OSError: The first error, after all started transfers have ended.
    """
    sizes = [each.nbytes for each in placed]  # once: there can be tens of thousands
    ended = count_bytes(progress, sum(sizes))
    start = engine.read
    alone = Transfers(ended=ended)
    places: list[tuple[int, int]] = []
    addresses: list[int] = []
    with engine.open(os.fspath(path), "r") as file:
        try:
            for (offset, memory), nbytes in zip(placed, sizes, strict=True):
                on_cpu = memory.device.type == "cpu"
                if on_cpu and nbytes < DIRECT_FROM:
                    places.append((offset, nbytes))
                    addresses.append(memory.data_ptr())
                    continue
                data = flat_bytes(memory)
                for at in range(0, nbytes, _PART) or (0,):
                    part = data[at : at + _PART]
                    begin, size = part.data_ptr(), part.numel()
                    if on_cpu and not populate_huge_pages(begin, size):  # meanwhile the drive reads earlier parts
                        cut = range(0, size, _PIECE)
                        places += [(offset + at + skip, min(_PIECE, size - skip)) for skip in cut]
                        addresses += [begin + skip for skip in cut]
                        continue
                    with _cut_off_is_damage(file):
                        alone.start(start, part, file, offset + at)
            for run, chunk, begin in read_small_pieces(places, file, engine, pool):
                for index in run:
                    if places[index][1] >= DIRECT_FROM:
                        prefault(addresses[index], places[index][1])  # meanwhile the drive reads the next chunks
                scatter([addresses[index] for index in run], [places[index] for index in run], chunk, begin)
                ended(sum(places[index][1] for index in run))
            alone.result()
        finally:
            alone.exception()  # nothing may be read into the memory after this returns


_PART = 8 << 20
"""Most bytes of one transfer. Larger tensors are read in several, so that progress is reported in between, and so that
the drive reads one part while the pages of the next are populated.
"""
_PIECE = 2 << 20
"""Most bytes of a piece of a tensor on ordinary pages. Such pieces are read through chunks, which are on huge pages: a drive
needs a segment for each ordinary page, so 1.5 GB took 1.2 s rather than 0.65 s.
"""


def started(engine: Engine, memory: torch.Tensor, file: File, offset: int) -> Future:
    """Start reading from a file into memory, and return the future of the read.

    Args:
        engine: Engine that does the transfer.
        memory: Contiguous tensor to fill.
        file: File to read.
        offset: Bytes from the start of the file.

    Raises:
        CorruptCheckpoint: If the file ends before the range does: it was truncated since its directory was read.
    """
    with _cut_off_is_damage(file):
        return engine.read(memory, file, offset)


@contextlib.contextmanager
def _cut_off_is_damage(file: File) -> Iterator[None]:
    """Turn the engine's ValueError for a range past the end of the file into CorruptCheckpoint."""
    try:
        yield
    except ValueError as error:
        if not hasattr(error, "file_size"):  # how Engine.read tells this one from the others
            raise
        raise CorruptCheckpoint(file.path, str(error)) from error


def read_small_pieces(
    places: Sequence[tuple[int, int]], file: File, engine: Engine, pool: BufferPool
) -> Iterator[tuple[list[int], torch.Tensor, int]]:
    """Read pieces of a file, neighbours together, and yield groups of them in the order of the file.

    At most 16 MiB are leased at a time.

    Args:
        places: (offset, bytes) of each piece, in any order, each of less than CHUNK - PAGE bytes. They may overlap.
        file: File to read.
        engine: Engine that does the transfers.
        pool: Pool of the chunks.

    Yields:
        (indices, chunk, begin): the indices of a group of pieces, the bytes of the file that they are in, and the offset of
        these bytes in the file. The chunk's memory is reused when the next group is requested.

    Raises:
        CorruptCheckpoint: If the file ends before the last byte of a piece.
        OSError: The first error, after all started transfers have ended.
    """
    size = file.size()
    if any(offset + nbytes > size for offset, nbytes in places):
        raise CorruptCheckpoint(file.path, f"it was cut off at byte {size}")

    def start(run: Run, chunk: torch.Tensor) -> Future:
        """Start reading a run of neighbouring pieces into a chunk, which may be longer than the rest of the file."""
        return engine.read(chunk[: min(run.end, size) - run.begin], file, run.begin)

    for run, chunk in transfer_ahead(runs([(0, *place) for place in places], CHUNK, PAGE, _GAP), start, pool):
        yield run.members, chunk, run.begin


# Files that are replaced while they are read: loading opens a path more than once, and what is loaded must come from one file.


def read_consistently(path: Path, load: Callable[[], Result]) -> Result:
    """Call ``load`` until the file was not replaced during the call, and return its result.

    Args:
        path: The file that ``load`` reads. It becomes the ``filename`` of OSErrors from ``load`` that have none.
        load: Reads the file. Called again after a replacement, also if it raised.

    Raises:
        Exception: What ``load`` raised, if the file was not replaced during that call.
    """
    while True:
        version = file_version(path)
        try:
            with with_filename(path):
                loaded = load()
        except Exception:
            if not is_replaced(path, version):
                raise
        else:
            if not is_replaced(path, version):
                return loaded
            del loaded  # frees the memory for the next attempt


@contextlib.contextmanager
def unless_replaced(versions: Mapping[Path, Version], what: str) -> Iterator[None]:
    """Raise OSError (ESTALE) after the ``with`` block if one of the files was replaced during it.

    For callers that cannot read again, as :func:`read_consistently` does.

    Args:
        versions: The files with their versions from before the block, see :func:`file_version`.
        what: What was replaced, for the message: "the checkpoint".

    Raises:
        OSError: ESTALE, if a file was replaced. An exception of the block becomes its cause.
    """
    cause: Exception | None = None
    try:
        yield
    except Exception as error:
        cause = error
    replaced = next((path for path, version in versions.items() if is_replaced(path, version)), None)
    if replaced is not None:
        raise OSError(errno.ESTALE, f"{what} was replaced while it was read: load it again", os.fspath(replaced)) from cause
    if cause is not None:
        raise cause


def file_version(path: Path) -> Version:
    """Return the current version of a file. Raises OSError if there is no such file."""
    status = os.stat(path)
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def is_replaced(path: Path, version: Version) -> bool:
    """Return whether the path now has another version. A file that was removed was not replaced."""
    try:
        return file_version(path) != version
    except FileNotFoundError:
        return False
