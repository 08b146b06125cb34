"""Write a file image to the drive: large pieces directly from their memory, small ones gathered into leased buffers."""

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
"""Most buffers leased at a time. Three keep the drive busy while the fourth is filled."""


@clearing_frames
def write(
    image: FileImage,
    file: File,
    engine: Engine,
    pool: BufferPool,
    parts: Sequence[tuple[int, int]] | None = None,
    progress: Progress | None = None,
) -> None:
    """Write a file image, or parts of it, into a file. Blocks until everything is written.

    At most 16 MiB are leased at a time. Ends of parts that are not page-aligned are written through the page cache.

    Args:
        image: Bytes of the file.
        file: File to write to.
        engine: Engine that does the transfers.
        pool: Pool of the buffers for small pieces.
        parts: Ranges of the file to write, each (begin, end) in bytes. None is the whole file.
        progress: Called with (bytes written, bytes to write).

    Raises:
        OutOfBuffers: If the pool's budget does not allow a buffer.
        OSError: The first error of a transfer, after all started transfers have ended.
    """
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
                # One call starts the write and keeps its future: Ctrl-C cannot come between the two.
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
            future.exception()  # the caller may change the memory after this returns
        chunks.release()


class _Chunks:
    """Leased buffers to write from. A buffer is filled again when the writes from it have ended."""

    def __init__(self, pool: BufferPool, nbytes: int) -> None:
        self._pool = pool
        self._nbytes = nbytes
        self._leased: deque[tuple[Lease, list[Future]]] = deque()
        """Each lease with the writes from it."""
        self._used = nbytes
        """Bytes used of the last lease."""

    def memory(self, begin: int, end: int) -> torch.Tensor:
        """Return memory for the bytes [begin, end) of the file.

        Its offset within a page is that of ``begin`` in the file, so that direct I/O needs no further copy.
        """
        start = self._used + (begin - self._used) % PAGE
        if not self._leased or start + end - begin > self._nbytes:
            self._leased.append((self._lease(), []))
            start = begin % PAGE
        self._used = start + end - begin
        return self._leased[-1][0].buffer[start : self._used]

    def read_by(self, future: Future) -> None:
        """Keep the memory that was returned last until this write has ended."""
        self._leased[-1][1].append(future)

    def release(self) -> None:
        """Release all leases. All writes must have ended."""
        for lease, _ in self._leased:
            lease.release()

    def _lease(self) -> Lease:
        """Return a new lease from the pool, or else the oldest of ours, after its writes have ended."""
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
