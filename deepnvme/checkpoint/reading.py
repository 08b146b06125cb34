"""Read byte ranges of a file: large ones directly into their memory, small neighbours together through leased chunks."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol, TypeVar

import torch

from deepnvme._progress import Progress, counting
from deepnvme.engine import Engine, File, Future
from deepnvme.memory.alignment import PAGE
from deepnvme.memory.host import give_pages
from deepnvme.memory.pool import BufferPool
from deepnvme.transfer.gather import CHUNK, DIRECT_FROM
from deepnvme.transfer.scatter import Run, read_ahead, runs, scatter

from .formats.contents import CorruptCheckpoint
from .formats.file_image import bytes_of
from .kept_errors import clearing_frames
from .storage_placement import PlacedStorage

_GAP = 64 << 10
"""Most bytes between two pieces that are read along with them instead of being skipped."""


class ByteRange(Protocol):
    """A range of bytes to read from a file. It must have fewer than CHUNK - PAGE bytes."""

    @property
    def offset(self) -> int:
        """Bytes from the start of the file."""
        ...

    @property
    def nbytes(self) -> int:
        """Number of bytes."""
        ...


P = TypeVar("P", bound=ByteRange)


@clearing_frames
def read(
    placed: Sequence[PlacedStorage],
    path: str | os.PathLike[str],
    engine: Engine,
    pool: BufferPool,
    progress: Progress | None = None,
) -> None:
    """Fill storages with their bytes from a file. Blocks. Leases at most 16 MiB at a time.

    Args:
        placed: The storages and their offsets, on the CPU or CUDA devices.
        path: The file.
        engine: Engine that does the transfers.
        pool: Pool of the chunks that small storages are read through.
        progress: Called with (bytes read, bytes to read).

    Raises:
        CorruptCheckpoint: If the file ends before the last byte of a storage.
        OSError: The first error, after all started transfers have ended.
    """
    ended = counting(progress, sum(each.nbytes for each in placed))
    together: list[PlacedStorage] = []
    with engine.open(os.fspath(path), "r") as file:
        alone: list[Future] = []
        try:
            for each in placed:
                if each.storage.device.type == "cpu" and each.nbytes < DIRECT_FROM:
                    together.append(each)
                else:
                    if each.storage.device.type == "cpu":
                        give_pages(each.storage.data_ptr(), each.nbytes)  # meanwhile the drive reads earlier storages
                    alone.append(started(engine, bytes_of(each.storage), file, each.offset))
            for run, chunk, begin in in_chunks(together, file, engine, pool):
                scatter([each.storage.data_ptr() for each in run], [(each.offset, each.nbytes) for each in run], chunk, begin)
                ended(sum(each.nbytes for each in run))
            for future in alone:
                future.result()
                ended(future.nbytes)
        finally:
            for future in alone:
                future.exception()  # the storages may be freed after this returns


def started(engine: Engine, memory: torch.Tensor, file: File, offset: int) -> Future:
    """Start reading from a file and return the future of the read.

    Args:
        engine: Engine that does the transfer.
        memory: Contiguous tensor to fill.
        file: File to read.
        offset: Bytes from the start of the file.

    Raises:
        CorruptCheckpoint: If the file ends before the range does: it was truncated since its directory was read.
    """
    try:
        return engine.read(memory, file, offset)
    except ValueError as error:
        if offset + memory.nbytes <= file.size():
            raise
        raise CorruptCheckpoint(file.path, str(error)) from error


def in_chunks(pieces: Iterable[P], file: File, engine: Engine, pool: BufferPool) -> Iterator[tuple[list[P], torch.Tensor, int]]:
    """Read pieces of a file, neighbours together, and yield groups of them in the order of the file.

    At most 16 MiB are leased at a time.

    Args:
        pieces: The ranges to read, in any order. They may overlap.
        file: File to read.
        engine: Engine that does the transfers.
        pool: Pool of the chunks.

    Yields:
        (pieces, chunk, begin): a group of pieces, the bytes of the file that they are in, and the offset of these bytes in the
        file. The chunk's memory is reused when the next group is requested.

    Raises:
        CorruptCheckpoint: If the file ends before the last byte of a piece.
        OSError: The first error, after all started transfers have ended.
    """
    pieces = list(pieces)
    size = file.size()
    if any(each.offset + each.nbytes > size for each in pieces):
        raise CorruptCheckpoint(file.path, f"it was cut off at byte {size}")

    def start(run: Run, chunk: torch.Tensor) -> Future:
        return engine.read(chunk[: min(run.end, size) - run.begin], file, run.begin)

    found = runs([(0, each.offset, each.nbytes) for each in pieces], CHUNK, PAGE, _GAP)
    for run, chunk in read_ahead(found, start, pool):
        yield [pieces[index] for index in run.members], chunk, run.begin
