"""A file's image on its way to the drive: large pieces from where they are, small ones through leased buffers."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from deepnvme._progress import Progress
from deepnvme.engine import Engine, File, Future, without_python
from deepnvme.memory.alignment import PAGE
from deepnvme.memory.lease import Lease
from deepnvme.memory.pool import BufferPool

from .formats.file_image import CHUNK, FileImage
from .kept_errors import clearing_frames

_CHUNKS = 4
"""Leased at a time: a drive is busy with three while the fourth is filled."""


@clearing_frames
def write(
    image: FileImage,
    file: File,
    engine: Engine,
    pool: BufferPool,
    parts: Sequence[tuple[int, int]] | None = None,
    progress: Progress | None = None,
) -> None:
    """Write the image into the file, or only its parts from a byte to another; their ends that are no page's go through the
    page cache. Blocks until that is done, with at most 16 MiB leased. Raises OutOfBuffers, and the first OSError when all that
    was begun has ended."""
    if parts is None:
        parts = [(0, image.nbytes)]
    total = sum(end - begin for begin, end in parts)
    start = without_python(engine.write)
    under_way: deque[tuple[int, Future]] = deque()
    chunks = _Chunks(pool, min(CHUNK, sum(end - begin + PAGE for begin, end in parts)))
    written = 0
    try:
        for begin, end in parts:
            for part in image.ranges(begin, end):
                tensor = part.tensor
                if tensor is None:
                    tensor = chunks.memory(part.begin, part.end)
                    image.copy(part.begin, part.end, tensor)
                # In one call, in which Ctrl-C cannot come between the start of the write and the note of it.
                under_way.extend(zip([part.end - part.begin], map(start, [tensor], [file], [part.begin]), strict=True))
                if part.tensor is None:
                    chunks.read_by(under_way[-1][1])
        while under_way:
            nbytes, future = under_way[0]
            future.result()
            under_way.popleft()
            written += nbytes
            if progress is not None:
                progress(written, total)
    finally:
        for _, future in under_way:
            future.exception()  # nobody may go on to change what is still being read
        chunks.release()


class _Chunks:
    """Leased memory that is written from, and filled again when that is done."""

    def __init__(self, pool: BufferPool, nbytes: int) -> None:
        self._pool = pool
        self._nbytes = nbytes
        self._leased: deque[tuple[Lease, list[Future]]] = deque()
        """With the writes from each."""
        self._used = nbytes
        """Bytes of the last one."""

    def memory(self, begin: int, end: int) -> torch.Tensor:
        """For these bytes of the file: as far behind a page's boundary as they are there, so that they need no other copy."""
        start = self._used + (begin - self._used) % PAGE
        if not self._leased or start + end - begin > self._nbytes:
            self._leased.append((self._lease(), []))
            start = begin % PAGE
        self._used = start + end - begin
        return self._leased[-1][0].buffer[start : self._used]

    def read_by(self, future: Future) -> None:
        """Keep what was given last for this write."""
        self._leased[-1][1].append(future)

    def release(self) -> None:
        """All, when all writes have ended."""
        for lease, _ in self._leased:
            lease.release()

    def _lease(self) -> Lease:
        """Of the pool, or the first of ours that is written."""
        lease = self._pool.try_lease(self._nbytes) if len(self._leased) < _CHUNKS else None
        if lease is not None:
            return lease
        if not self._leased:
            return self._pool.lease(self._nbytes)
        lease, futures = self._leased[0]
        for future in futures:
            future.result()
        self._leased.popleft()
        return lease
