"""Write a file image to the drive: large pieces directly from their memory, small ones gathered into leased buffers."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from deepnvme._progress import Progress, counting
from deepnvme.engine import Engine, File, Future, without_python
from deepnvme.memory.alignment import PAGE
from deepnvme.memory.pool import BufferPool
from deepnvme.transfer.gather import CHUNK, ChunkRing

from .formats.file_image import FileImage
from .kept_errors import clearing_frames


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
    ended = counting(progress, sum(end - begin for begin, end in parts))
    start = without_python(engine.write)
    under_way: deque[tuple[int, Future]] = deque()
    ring = ChunkRing(pool, min(CHUNK, sum(end - begin + PAGE for begin, end in parts)), wait=True)

    def end_first() -> None:
        nbytes, future = under_way[0]
        future.result()
        under_way.popleft()
        ended(nbytes)

    try:
        for begin, end in parts:
            for part in image.ranges(begin, end):
                tensor = part.tensor
                if tensor is None:
                    tensor = ring.memory(part.begin, part.end)
                    assert tensor is not None  # because the ring waits for the pool
                    image.copy(part.begin, part.end, tensor)
                # One call starts the write and keeps its future: Ctrl-C cannot come between the two.
                under_way.extend(zip([part.end - part.begin], map(start, [tensor], [file], [part.begin]), strict=True))
                if part.tensor is None:
                    ring.sent([under_way[-1][1]])
                while under_way and under_way[0][1].done():
                    end_first()
        while under_way:
            end_first()
    finally:
        for _, future in under_way:
            future.exception()  # the caller may change the memory after this returns
        ring.release()
