"""Storages read from a file: large ones straight into place, small neighbours together."""

from __future__ import annotations

import os
from array import array
from collections import deque
from collections.abc import Iterator, Sequence

from deepnvme._tensor_memory import copy_many
from deepnvme.engine import Engine, Future
from deepnvme.swap.buffers import BufferPool
from deepnvme.swap.lease import Lease

from .file_image import CHUNK, DIRECT_FROM, PAGE, bytes_of
from .placing import Placed
from .writing import Progress

_CHUNKS = 4
_GAP = 64 << 10
"""Bytes between two storages that are read with them rather than skipped."""


def read(
    placed: Sequence[Placed],
    path: str | os.PathLike[str],
    engine: Engine,
    pool: BufferPool,
    progress: Progress | None = None,
) -> None:
    """Fill the storages from the file. Blocks, with at most 16 MiB leased. Raises the first OSError when all has ended."""
    total = sum(each.storage.nbytes() for each in placed)
    done = 0

    def ended(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        if progress is not None:
            progress(done, total)

    together: list[Placed] = []
    with engine.open(os.fspath(path), "r") as file:
        size = file.size()
        alone: list[Future] = []
        chunks: deque[tuple[Lease, Future, int, list[Placed]]] = deque()

        def first() -> Lease:
            lease = _scatter(*chunks[0])
            ended(sum(each.storage.nbytes() for each in chunks.popleft()[3]))
            return lease

        try:
            for each in placed:
                if each.storage.device.type == "cpu" and each.storage.nbytes() < DIRECT_FROM:
                    together.append(each)
                else:
                    alone.append(engine.read(bytes_of(each.storage), file, each.offset))
            for run in _runs(together):
                begin = run[0].offset // PAGE * PAGE
                last = run[-1]
                end = min(-(-(last.offset + last.storage.nbytes()) // PAGE) * PAGE, size)
                lease = pool.try_lease(CHUNK) if len(chunks) < _CHUNKS else None
                if lease is None and chunks:
                    lease = first()
                elif lease is None:
                    lease = pool.lease(CHUNK)
                chunks.append((lease, engine.read(lease.buffer[: end - begin], file, begin), begin, run))
            while chunks:
                first().release()
            for future in alone:
                future.result()
                ended(future.nbytes)
        finally:
            for future in [*alone, *(future for _, future, _, _ in chunks)]:
                future.exception()  # the storages may go now, and nothing may be read into them then


def _scatter(lease: Lease, future: Future, begin: int, run: Sequence[Placed]) -> Lease:
    """Wait for the chunk, copy from it, and return what it was read into."""
    future.result()
    base = lease.buffer.data_ptr() - begin
    copy_many(
        array("Q", (each.storage.data_ptr() for each in run)),
        array("Q", (base + each.offset for each in run)),
        array("Q", (each.storage.nbytes() for each in run)),
    )
    return lease


def _runs(placed: Sequence[Placed]) -> Iterator[list[Placed]]:
    """In the order of the file, as many at a time as lie near each other and fit into a chunk."""
    run: list[Placed] = []
    begin = end = 0
    for each in sorted(placed, key=lambda each: each.offset):
        nbytes = each.storage.nbytes()
        if run and (each.offset - end > _GAP or each.offset + nbytes + PAGE - begin > CHUNK):
            yield run
            run = []
        if not run:
            begin = each.offset // PAGE * PAGE
        run.append(each)
        end = each.offset + nbytes
    if run:
        yield run
