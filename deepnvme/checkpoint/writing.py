"""A file's image on its way to the drive: large pieces from where they are, small ones through leased buffers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from deepnvme.engine import Engine, File, Future
from deepnvme.swap.buffers import BufferPool
from deepnvme.swap.lease import Lease

from .file_image import CHUNK, FileImage

_CHUNKS = 4
"""Leased at a time: a drive is busy with three while the fourth is filled."""

Progress = Callable[[int, int], None]
"""Told the bytes that are written, and those of the file."""


def write(
    image: FileImage,
    file: File,
    engine: Engine,
    pool: BufferPool,
    begin: int = 0,
    end: int | None = None,
    progress: Progress | None = None,
) -> None:
    """Write [begin, end) of the image (see :meth:`FileImage.ranges`) into the file. Blocks until that is done, with at most
    16 MiB leased. Raises OutOfBuffers, and the first OSError when all that was begun has ended."""
    end = image.nbytes if end is None else end
    under_way: deque[tuple[int, Future]] = deque()
    leased: deque[tuple[Lease, Future]] = deque()
    written = 0
    try:
        for part in image.ranges(begin, end):
            if part.tensor is not None:
                future = engine.write(part.tensor, file, part.begin)
            else:
                lease = _lease(pool, leased, min(CHUNK, end - begin))
                buffer = lease.buffer[: part.end - part.begin]
                image.copy(part.begin, part.end, buffer)
                future = engine.write(buffer, file, part.begin)
                leased.append((lease, future))
            under_way.append((part.end - part.begin, future))
        while under_way:
            nbytes, future = under_way[0]
            future.result()
            under_way.popleft()
            written += nbytes
            if progress is not None:
                progress(written, end - begin)
    finally:
        for _, future in under_way:
            future.exception()  # nobody may go on to change what is still being read
        for lease, future in leased:
            lease.release(after=future)


def _lease(pool: BufferPool, leased: deque[tuple[Lease, Future]], nbytes: int) -> Lease:
    """Memory of the pool, or that of the first chunk of ours that is written."""
    lease = pool.try_lease(nbytes) if len(leased) < _CHUNKS else None
    if lease is not None:
        return lease
    if not leased:
        return pool.lease(nbytes)
    lease, future = leased.popleft()
    future.result()
    return lease
