"""A snapshot of a file image: one thread copies it into leased memory, chunk by chunk, and another writes it from there."""

from __future__ import annotations

import itertools
import queue
from typing import TYPE_CHECKING

import torch

from deepnvme.engine import Engine, File, Future
from deepnvme.memory.alignment import PAGE
from deepnvme.memory.lease import Lease
from deepnvme.memory.pool import BufferPool
from deepnvme.transfer.gather import CHUNK, Transfers

from .formats.file_image import FileImage, add_checksums

if TYPE_CHECKING:
    from deepnvme.ops.aio.async_io_op.checkpoint import Checksums

_LARGEST = 32 << 20
"""Most bytes of a chunk: enough for two threads to share the copying, and little compared with a model's state."""


class Cancelled(Exception):
    """The snapshot was cancelled before it was written."""


class Snapshot:
    """A file image with the values that it has now, copied by one thread and written by another.

    The copied chunks pass through a queue in the order of the file, so that writing begins with the first chunk. The first
    thread calls :meth:`stage`, or else :meth:`cancel`. The second thread calls :meth:`write` and, in any case,
    :meth:`close`. After :meth:`cancel`, ``write`` raises Cancelled.

    Args:
        image: Bytes of the file.
        pool: Pool of the memory that the image is copied into.
    """

    def __init__(self, image: FileImage, pool: BufferPool) -> None:
        self.nbytes = image.nbytes
        self._image: FileImage | None = image
        self._checksums = image.checksums
        self._pool = pool
        self._chunk = min(_LARGEST, max(CHUNK, pool.budget // 4 // PAGE * PAGE))
        self._chunks: queue.SimpleQueue[_StagedChunk | None] = queue.SimpleQueue()
        self._ended = False
        """Whether the writing thread has taken the end marker of the queue."""
        self._stopped = False
        self._cancelled = False

    def ensure_memory(self) -> None:
        """Raise OutOfBuffers if the memory for the first chunk can never be leased, or this thread has leased it.

        In the latter case the writing thread would wait for this thread, and this thread possibly for the writing thread.
        """
        self._pool.ensure_possible(self._size(0))

    def stage(self) -> None:
        """Copy the image, waiting for memory of the pool where it has too little. Blocks. The image is not used afterwards.

        Raises:
            OutOfBuffers: If the pool has no memory for a chunk in time.
        """
        image, self._image = self._image, None
        assert image is not None
        leases: list[Lease] = []
        at = 0
        try:
            # All free memory is leased before the first chunk is copied, so that every save leases the same amount. Otherwise a
            # varying number of chunks would reuse memory that was written meanwhile, and the pinned memory would grow.
            while at < self.nbytes and (lease := self._pool.try_lease(self._size(at))) is not None:
                leases.append(lease)
                at += lease.nbytes
            at = 0
            for index in itertools.count():
                if at == self.nbytes or self._stopped:
                    break
                if index == len(leases):
                    leases.append(self._pool.lease(self._size(at)))
                lease = leases[index]
                image.copy(at, at + lease.nbytes, lease.buffer)
                chunk = _StagedChunk(at, lease.buffer)
                self._chunks.put(chunk)  # before the release: from now on there is a thread that writes or drops it
                lease.release(after=chunk)
                at += lease.nbytes
        except BaseException:
            self._cancelled = True
            raise
        finally:
            for lease in leases:
                lease.release()  # those that were not filled
            self._chunks.put(None)

    def cancel(self) -> None:
        """Stop the snapshot: nothing more is copied or written."""
        self._cancelled = True
        self._chunks.put(None)

    def write(self, file: File, engine: Engine) -> None:
        """Write the chunks as they are copied. Blocks.

        Args:
            file: File to write to.
            engine: Engine that does the transfers.

        Raises:
            Cancelled: If :meth:`cancel` was called.
            OSError: The first error of a transfer, after all started transfers have ended.
        """
        under_way = Transfers()
        try:
            while (chunk := self._next()) is not None:
                if self._checksums is not None:
                    chunk.add_checksums(self._checksums)
                under_way.start(chunk.write, file, engine)
                under_way.take_ended()
            if self._cancelled:
                raise Cancelled
            under_way.result()
        finally:
            under_way.exception()

    def close(self) -> None:
        """Release all chunks, whether or not they were written. Waits for a thread in :meth:`stage` to stop."""
        self._stopped = True
        while not self._ended:
            chunk = self._next()
            if chunk is not None:
                chunk.give_up()
        self._image = None

    def _size(self, at: int) -> int:
        """Return the size in bytes of the chunk that begins at byte ``at`` of the file."""
        return min(self._chunk, self.nbytes - at)

    def _next(self) -> _StagedChunk | None:
        """Return the next chunk from the queue, or None if the first thread adds no more. Blocks."""
        chunk = None if self._ended else self._chunks.get()
        self._ended = chunk is None
        return chunk


class _StagedChunk:
    """A copied part of the file in leased memory. The lease is released once the chunk is written, failed or given up."""

    def __init__(self, begin: int, buffer: torch.Tensor) -> None:
        self._begin = begin
        self._buffer: torch.Tensor | None = buffer
        self._future: Future | None = None

    def add_checksums(self, checksums: Checksums) -> None:
        """Compute checksums over the chunk, and fill in those that are stored in it. Called in the order of the file."""
        assert self._buffer is not None
        try:
            add_checksums(checksums, self._begin, self._buffer)
        except BaseException:
            self.give_up()
            raise

    def write(self, file: File, engine: Engine) -> Future:
        """Start writing the chunk and return the future of the write."""
        assert self._buffer is not None
        try:
            self._future = engine.write(self._buffer, file, self._begin)
        finally:
            self._buffer = None  # the transfer keeps the memory alive
        return self._future

    def give_up(self) -> None:
        """Drop the bytes without writing them."""
        self._buffer = None

    def done(self) -> bool:
        """Return whether the chunk's memory is no longer needed: written, failed or given up. Never blocks."""
        return self._buffer is None and (self._future is None or self._future.done())

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait until the write has ended, and return its error, or None if it succeeded or was not started."""
        return None if self._future is None else self._future.exception(timeout)
