"""A file's image as it is now: copied chunk by chunk into leased memory, and written from there by another thread."""

from __future__ import annotations

import contextlib
import queue
from collections import deque
from collections.abc import Iterator

import torch

from deepnvme.engine import Engine, File, Future
from deepnvme.memory.alignment import PAGE
from deepnvme.memory.lease import Lease
from deepnvme.memory.pool import BufferPool

from .formats.file_image import CHUNK, FileImage
from .kept_errors import clearing_frames
from .latch import Latch

_LARGEST = 32 << 20
"""Bytes of a chunk: enough for two threads to copy, few beside a state."""


class Cancelled(Exception):
    """Nobody wants the snapshot any more."""


class Snapshot:
    """What is staged goes through a queue, in the order of the file, so that writing begins with the first chunk.

    One thread calls ``ensure_memory``, and ``stage`` or ``leave``, once; another ``write``, which stages what the first has
    left, and in any case ``close``. After ``cancel``, by the first, ``write`` raises Cancelled.
    """

    def __init__(self, image: FileImage, pool: BufferPool) -> None:
        image.fence()
        self.nbytes = image.nbytes
        self.staged = Latch()
        """Set when the image is not looked at any more."""
        self._image: FileImage | None = image
        self._pool = pool
        self._chunk = min(_LARGEST, max(CHUNK, pool.budget // 4 // PAGE * PAGE))
        self._at = 0
        """The first byte that is not staged."""
        self._chunks: queue.SimpleQueue[_Chunk | None] = queue.SimpleQueue()
        self._left = False
        """Whether the first thread is known to have done its part."""
        self._stopped = False
        self._cancelled = False

    def ensure_memory(self) -> None:
        """Raise OutOfBuffers where the memory for a first chunk is held by this thread, or can never be had: whoever writes would
        wait for it, and this thread perhaps for him."""
        with contextlib.suppress(TimeoutError):  # others hold it, and give it back
            self._pool.lease(self._size(self._at), timeout=0).release()

    @clearing_frames
    def stage(self) -> None:
        """Copy as much as the pool has memory for now, and leave the rest. Blocks for as long as the copying takes."""
        try:
            for lease in self._leases():
                if self._stopped:
                    break
                chunk = self._copied(lease)
                self._chunks.put(chunk)  # only now there is who writes it, for whom the lease can wait
                lease.release(after=chunk)
        except BaseException:
            self._cancelled = True
            raise
        finally:
            self.leave()

    def leave(self) -> None:
        """Have the rest staged by whoever writes."""
        if self._at == self.nbytes:
            self._let_go()
        self._chunks.put(None)

    def cancel(self) -> None:
        """Have the rest neither staged nor written."""
        self._cancelled = True
        self._chunks.put(None)

    def write(self, file: File, engine: Engine) -> None:
        """Write all, as it is staged. Blocks. Raises Cancelled; OutOfBuffers; the first OSError, when all that was begun has
        ended."""
        under_way: deque[Future] = deque()
        try:
            for chunk in self._all():
                under_way.append(chunk.write(file, engine))
                while under_way and under_way[0].done():
                    under_way.popleft().result()
            self._let_go()
            if self._cancelled:
                raise Cancelled
            while under_way:
                under_way.popleft().result()
        finally:
            for future in under_way:
                future.exception()

    def close(self) -> None:
        """Let go of everything, whatever has become of it. Waits for a thread that stages to notice."""
        self._stopped = True
        while not self._left:
            chunk = self._next()
            if chunk is not None:
                chunk.give_up()
        self._let_go()

    def _all(self) -> Iterator[_Chunk]:
        while (chunk := self._next()) is not None:
            yield chunk
        while self._at < self.nbytes and not self._cancelled:
            lease = self._pool.lease(self._size(self._at))
            chunk = self._copied(lease)
            lease.release(after=chunk)
            yield chunk

    def _leases(self) -> list[Lease]:
        """For all, or what the pool has for now. Before the first is copied to, so that they are as many each time: memory that
        was written meanwhile would serve again, now more and now less of it, and save after save would have some pinned."""
        leases: list[Lease] = []
        at = self._at
        while at < self.nbytes and (lease := self._pool.try_lease(self._size(at))) is not None:
            leases.append(lease)
            at += lease.nbytes
        return leases

    def _size(self, at: int) -> int:
        return min(self._chunk, self.nbytes - at)

    def _copied(self, lease: Lease) -> _Chunk:
        """The next bytes."""
        assert self._image is not None
        self._image.copy(self._at, self._at + lease.nbytes, lease.buffer)
        chunk = _Chunk(self._at, lease.buffer)
        self._at += lease.nbytes
        return chunk

    def _next(self) -> _Chunk | None:
        chunk = None if self._left else self._chunks.get()
        self._left = chunk is None
        return chunk

    def _let_go(self) -> None:
        self._image = None
        self.staged.set()


class _Chunk:
    """Bytes of the file, and what their lease is released after: that they are written, or never will be."""

    def __init__(self, begin: int, buffer: torch.Tensor) -> None:
        self._begin = begin
        self._buffer: torch.Tensor | None = buffer
        self._future: Future | None = None

    def write(self, file: File, engine: Engine) -> Future:
        """Start that."""
        assert self._buffer is not None
        try:
            self._future = engine.write(self._buffer, file, self._begin)
        finally:
            self._buffer = None  # the transfer keeps it
        return self._future

    def give_up(self) -> None:
        self._buffer = None

    def done(self) -> bool:
        return self._buffer is None and (self._future is None or self._future.done())

    def exception(self, timeout: float | None = None) -> BaseException | None:
        return None if self._future is None else self._future.exception(timeout)
