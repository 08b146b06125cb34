"""A snapshot of a file image: one thread copies it into leased memory, chunk by chunk, and another writes it from there."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from deepnvme.engine import Engine, File, Future
from deepnvme.memory.alignment import PAGE
from deepnvme.memory.lease import Lease
from deepnvme.memory.pool import BufferPool
from deepnvme.transfer.gather import CHUNK, Transfers

from .file_io import clearing_frames
from .formats.file_image import FileImage, add_checksums

if TYPE_CHECKING:
    from deepnvme.ops.aio.async_io_op.checkpoint import Checksums

_LARGEST = 32 << 20
"""Most bytes of a chunk: enough for two threads to share the copying, and little compared with a model's state."""


class Cancelled(Exception):
    """The snapshot was cancelled before it was written."""


class Snapshot:
    """A file image with the values that it has now, copied by one thread and written by another.

    The copied chunks pass through a queue in the order of the file, so that writing begins with the first chunk. CUDA
    memory is copied after the work that is now queued on the current streams of the creating thread.

    The first thread calls :meth:`ensure_memory` and then either :meth:`stage` or :meth:`leave`. It may call
    :meth:`cancel`. The second thread calls :meth:`write`, which also copies the chunks that the first thread has not
    copied; and, in any case, :meth:`close`. After :meth:`cancel`, ``write`` raises Cancelled.

    Args:
        image: Bytes of the file. Not used any more once ``staged`` is set.
        pool: Pool of the memory that the image is copied into.
    """

    def __init__(self, image: FileImage, pool: BufferPool) -> None:
        image.fence()
        self.nbytes = image.nbytes
        self.staged = threading.Event()
        """Set when the image is not used any more, so that its tensors may change."""
        self._image: FileImage | None = image
        self._checksums = image.checksums
        self._pool = pool
        self._chunk = min(_LARGEST, max(CHUNK, pool.budget // 4 // PAGE * PAGE))
        self._at = 0
        """Offset of the first byte that is not copied yet."""
        self._chunks: queue.SimpleQueue[_StagedChunk | None] = queue.SimpleQueue()
        self._left = False
        """Whether the writing thread has taken the end marker of the queue: the first thread copies no more chunks."""
        self._stopped = False
        self._cancelled = False

    def ensure_memory(self) -> None:
        """Raise OutOfBuffers if the memory for the first chunk can never be leased, or this thread holds it.

        If this thread held it, the writing thread would wait for this thread, and this thread possibly for the writing thread.
        """
        self._pool.ensure_possible(self._size(self._at))

    @clearing_frames
    def stage(self) -> None:
        """Copy the chunks that the pool has memory for now, and leave the other chunks to :meth:`write`. Blocks while copying."""
        try:
            for lease in self._leases():
                if self._stopped:
                    break
                chunk = self._copied(lease)
                self._chunks.put(chunk)  # before the release: from now on there is a thread that writes or drops it
                lease.release(after=chunk)
        except BaseException:
            self._cancelled = True
            raise
        finally:
            self.leave()

    def leave(self) -> None:
        """Hand over to the writing thread: :meth:`write` copies the chunks that are not copied yet."""
        if self._at == self.nbytes:
            self._drop_image()
        self._chunks.put(None)

    def cancel(self) -> None:
        """Stop the snapshot: nothing more is copied or written."""
        self._cancelled = True
        self._chunks.put(None)

    def write(self, file: File, engine: Engine) -> None:
        """Write the chunks as they are copied, then copy and write the chunks that :meth:`stage` has left. Blocks.

        Args:
            file: File to write to.
            engine: Engine that does the transfers.

        Raises:
            Cancelled: If :meth:`cancel` was called.
            OutOfBuffers: If the pool's budget does not allow a chunk.
            OSError: The first error of a transfer, after all started transfers have ended.
        """
        under_way = Transfers()
        try:
            for chunk in self._all():
                if self._checksums is not None:
                    chunk.add_checksums(self._checksums)
                under_way.start(chunk.write, file, engine)
                under_way.take_ended()
            self._drop_image()
            if self._cancelled:
                raise Cancelled
            under_way.result()
        finally:
            under_way.exception()

    def close(self) -> None:
        """Release the image and all chunks, whether or not they were written. Waits for a thread in :meth:`stage` to stop."""
        self._stopped = True
        while not self._left:
            chunk = self._next()
            if chunk is not None:
                chunk.give_up()
        self._drop_image()

    def _all(self) -> Iterator[_StagedChunk]:
        """Yield the chunks of the queue, then copy and yield the chunks that the first thread has not copied."""
        while (chunk := self._next()) is not None:
            yield chunk
        while self._at < self.nbytes and not self._cancelled:
            lease = self._pool.lease(self._size(self._at))
            chunk = self._copied(lease)
            lease.release(after=chunk)
            yield chunk

    def _leases(self) -> list[Lease]:
        """Return leases for the whole image, or for as much of it as the pool has memory for now.

        All are leased before the first is filled, so that every save leases the same amount. If chunks were leased one by
        one, a varying number of them would reuse memory that was written meanwhile, and the pinned memory would grow from
        save to save.
        """
        leases: list[Lease] = []
        at = self._at
        while at < self.nbytes and (lease := self._pool.try_lease(self._size(at))) is not None:
            leases.append(lease)
            at += lease.nbytes
        return leases

    def _size(self, at: int) -> int:
        """Return the size in bytes of the chunk that begins at byte ``at`` of the file."""
        return min(self._chunk, self.nbytes - at)

    def _copied(self, lease: Lease) -> _StagedChunk:
        """Copy the next bytes of the image into the lease and return them as a chunk."""
        assert self._image is not None
        self._image.copy(self._at, self._at + lease.nbytes, lease.buffer)
        chunk = _StagedChunk(self._at, lease.buffer)
        self._at += lease.nbytes
        return chunk

    def _next(self) -> _StagedChunk | None:
        """Return the next chunk from the queue, or None if the first thread adds no more. Blocks."""
        chunk = None if self._left else self._chunks.get()
        self._left = chunk is None
        return chunk

    def _drop_image(self) -> None:
        """Drop the image and signal that its tensors may change."""
        self._image = None
        self.staged.set()


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
