"""Storages read from a file: large ones straight into place, small neighbours together."""

from __future__ import annotations

import os
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Generic, Protocol, TypeVar

import torch

from deepnvme._progress import Progress, counting
from deepnvme.engine import Engine, File, Future
from deepnvme.memory.alignment import PAGE
from deepnvme.memory.host import give_pages
from deepnvme.memory.lease import Lease
from deepnvme.memory.pool import BufferPool
from deepnvme.memory.tensor_bytes import copy_many

from .formats.contents import CorruptCheckpoint
from .formats.file_image import CHUNK, DIRECT_FROM, bytes_of
from .kept_errors import clearing_frames
from .storage_placement import PlacedStorage

_CHUNKS = 4
_GAP = 64 << 10
"""Bytes between two pieces that are read with them rather than skipped."""


class ByteRange(Protocol):
    """Bytes of a file that somebody wants; fewer than CHUNK - PAGE of them."""

    @property
    def offset(self) -> int: ...

    @property
    def nbytes(self) -> int: ...


P = TypeVar("P", bound=ByteRange)


@clearing_frames
def read(
    placed: Sequence[PlacedStorage],
    path: str | os.PathLike[str],
    engine: Engine,
    pool: BufferPool,
    progress: Progress | None = None,
) -> None:
    """Fill the storages from the file. Blocks, with at most 16 MiB leased. Raises the first OSError when all has ended."""
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
                        give_pages(each.storage.data_ptr(), each.nbytes)  # while the drive reads those before
                    alone.append(started(engine, bytes_of(each.storage), file, each.offset))
            for run, chunk, begin in in_chunks(together, file, engine, pool):
                scatter([each.storage.data_ptr() for each in run], run, chunk, begin)
                ended(sum(each.nbytes for each in run))
            for future in alone:
                future.result()
                ended(future.nbytes)
        finally:
            for future in alone:
                future.exception()  # the storages may go now, and nothing may be read into them then


def started(engine: Engine, memory: torch.Tensor, file: File, offset: int) -> Future:
    """A read. Raises CorruptCheckpoint where the file ends before: somebody has cut it off since it was looked at."""
    try:
        return engine.read(memory, file, offset)
    except ValueError as error:
        if offset + memory.nbytes <= file.size():
            raise
        raise CorruptCheckpoint(file.path, str(error)) from error


def in_chunks(pieces: Iterable[P], file: File, engine: Engine, pool: BufferPool) -> Iterator[tuple[list[P], torch.Tensor, int]]:
    """Read the pieces, neighbours together: yields some of them at a time, in the order of the file, with the chunk of the file
    that they lie in and its offset. A chunk's memory is used again when the next is asked for. At most 16 MiB are leased. Raises
    the first OSError when all has ended."""
    size = file.size()
    waiting: deque[_Chunk[P]] = deque()
    try:
        for run, begin, end in _runs(pieces):
            end = min(end, size)
            if max(each.offset + each.nbytes for each in run) > size:
                raise CorruptCheckpoint(file.path, f"it was cut off at byte {size}")
            lease = pool.try_lease(CHUNK) if len(waiting) < _CHUNKS else None
            if lease is None and waiting:
                yield waiting[0].wait()
                lease = waiting.popleft().lease
            elif lease is None:
                lease = pool.lease(CHUNK)
            waiting.append(_Chunk(lease, engine.read(lease.buffer[: end - begin], file, begin), begin, run))
        while waiting:
            yield waiting[0].wait()
            waiting.popleft().lease.release()
    finally:
        for chunk in waiting:
            chunk.future.exception()


def scatter(addresses: Iterable[int], pieces: Sequence[ByteRange], chunk: torch.Tensor, begin: int) -> None:
    """Copy pieces from the chunk of the file that begins at ``begin`` to the addresses."""
    base = chunk.data_ptr() - begin
    copy_many(
        array("Q", addresses),
        array("Q", (base + each.offset for each in pieces)),
        array("Q", (each.nbytes for each in pieces)),
    )


class _Chunk(Generic[P]):
    """One that is being read."""

    def __init__(self, lease: Lease, future: Future, begin: int, run: list[P]) -> None:
        self.lease = lease
        self.future = future
        self._begin = begin
        self._run = run

    def wait(self) -> tuple[list[P], torch.Tensor, int]:
        self.future.result()
        return self._run, self.lease.buffer, self._begin


def _runs(pieces: Iterable[P]) -> Iterator[tuple[list[P], int, int]]:
    """In the order of the file, as many at a time as lie near each other and fit into a chunk, from a byte to an end."""
    run: list[P] = []
    begin = end = 0
    for each in sorted(pieces, key=lambda each: each.offset):
        offset, nbytes = each.offset, each.nbytes
        if run and (offset - end > _GAP or offset + nbytes + PAGE - begin > CHUNK):
            yield run, begin, -(-end // PAGE) * PAGE
            run = []
        if not run:
            begin = end = offset // PAGE * PAGE
        run.append(each)
        end = max(end, offset + nbytes)  # pieces may overlap
    if run:
        yield run, begin, -(-end // PAGE) * PAGE
