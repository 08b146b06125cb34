"""A file to write to, for ``torch.save`` and the like, whose bytes go to the drive from pinned memory."""

from __future__ import annotations

import io
import os
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from deepnvme.memory.alignment import PAGE
from deepnvme.memory.tensor_bytes import memory_of

from .base_file_writer import BaseFileWriter
from .constants import (
    AIO_FILL_BUFFER_COUNT_KEY,
    AIO_FILL_BUFFER_SEC_KEY,
    AIO_FILL_BUFFER_SPEED_KEY,
    AIO_SPEED_KEY,
    AIO_WRITE_BYTES_KEY,
    AIO_WRITE_SEC_KEY,
    SAVE_STORAGE_BYTES_KEY,
    SAVE_STORAGE_KEY,
    SLOW_WRITE_BYTES_KEY,
    SLOW_WRITE_SEC_KEY,
)

if TYPE_CHECKING:
    import torch

SMALLEST_TENSOR = 2 * PAGE
"""Bytes of a ``pinned_tensor`` that is used in halves."""
_COUNTED = (
    AIO_WRITE_SEC_KEY,
    AIO_WRITE_BYTES_KEY,
    AIO_SPEED_KEY,
    SLOW_WRITE_BYTES_KEY,
    SLOW_WRITE_SEC_KEY,
    AIO_FILL_BUFFER_COUNT_KEY,
    AIO_FILL_BUFFER_SEC_KEY,
    AIO_FILL_BUFFER_SPEED_KEY,
    SAVE_STORAGE_KEY,
    SAVE_STORAGE_BYTES_KEY,
)


@dataclass
class FastFileWriterConfig:
    """Contract: DeepSpeed 0.19, ``io/fast_file_writer.py``."""

    dnvme_handle: Any
    """An ``aio_handle`` that has nothing else to do meanwhile; or a ``gds_handle``, with a tensor on its device."""
    pinned_tensor: torch.Tensor
    """Dense bytes of the handle's locked memory; not to be touched before the file is closed."""
    double_buffer: bool = True
    """Fill one half of the tensor while the other is being written."""
    num_parallel_writers: int = 1
    """How many writers share a list of storages: see :meth:`FastFileWriter.save_torch_storage_object_list`."""
    writer_rank: int = 0
    """Which of them this is."""
    global_rank: int = 0
    """Of the process, in DeepSpeed's logs only."""


class FastFileWriter(BaseFileWriter):
    """Opens ``file_path`` for writing, empty. ``write`` copies into the pinned tensor and blocks only while that is full.

    What is written is in the file after :meth:`flush`, and on stable storage after :meth:`close`, as with DeepSpeed's. Raises
    ValueError for a tensor too small or of another type and for a writer's rank out of range, OSError from opening and, for a
    write that failed behind, from the next ``write``, ``seek``, ``flush`` or ``close``. Not thread-safe.

    In the statistics "slow" bytes are those of pages that were written in part, which pass through the page cache; the time that
    they take is part of that of all.
    """

    def __init__(self, file_path: str | os.PathLike[str], config: FastFileWriterConfig) -> None:
        super().__init__(file_path)
        self._file: io.FileIO | None = None  # nothing to flush or close
        self._sending = False  # whether a write of ours may be under way on the handle
        self._stats |= dict.fromkeys(_COUNTED, 0)
        tensor = config.pinned_tensor
        halves = 2 if config.double_buffer else 1
        self._size = tensor.nbytes // halves // PAGE * PAGE  # whole pages go past the page cache
        if tensor.element_size() != 1 or not tensor.is_contiguous() or self._size == 0:
            raise ValueError(
                f"pinned_tensor must be contiguous bytes, at least {halves * PAGE} of them, "
                f"got {tensor.nbytes} bytes of {tensor.dtype}"
            )
        if not 0 <= config.writer_rank < config.num_parallel_writers:
            raise ValueError(
                f"writer_rank must be in [0, num_parallel_writers = {config.num_parallel_writers}), got {config.writer_rank}"
            )
        self._handle = config.dnvme_handle
        self._writers, self._rank = config.num_parallel_writers, config.writer_rank
        self._halves = [tensor.view(-1)[half * self._size : (half + 1) * self._size] for half in range(halves)]
        self._begin = 0  # where in the file the first of the halves begins
        self._filled = 0  # bytes in it
        self._flushed = 0  # of those, written already
        self._file = io.FileIO(os.fspath(file_path), "w")

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._begin + self._filled

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Go elsewhere in the file, to write over what is there, or to leave zeros in between; all before is flushed."""
        self._open_file()
        self._drain()
        if whence == os.SEEK_CUR:
            offset += self.tell()
        elif whence == os.SEEK_END:
            offset += os.fstat(self._open_file().fileno()).st_size
        elif whence != os.SEEK_SET:
            raise ValueError(f"whence must be 0, 1 or 2, got {whence}")
        if offset < 0:
            raise ValueError(f"the position must not be negative, got {offset}")
        self._begin, self._filled, self._flushed = offset, 0, 0
        return offset

    def write(self, data: Any) -> int:
        """Take all of ``data``, anything with the buffer protocol, and return its length in bytes."""
        self._open_file()
        began = time.perf_counter()
        with memoryview(data) as given, given.cast("B") as source:
            taken = 0
            while taken < len(source):
                count = min(self._room(), len(source) - taken)
                with source[taken : taken + count] as piece:
                    self._fill_from(piece)
                self._advance(count)
                taken += count
            self._wrote(taken, time.perf_counter() - began)
            return taken

    def save_torch_storage_object_list(self, storage_obj_list: Sequence[tuple[Any, torch.dtype]], save_size: bool) -> int:
        """Write storages, each given with the dtype of its elements, one after the other; return the bytes written.

        ``save_size``: each after its number of elements, as 8 bytes, little-endian, as in torch's older file format. Of several
        writers each has a file of its own, and writes the ``writer_rank``-th of ``num_parallel_writers`` parts of these
        bytes, the first ones a byte longer where they are not equal: their files make the whole. Storages may be on a device.
        """
        self._open_file()
        pieces: list[bytes | torch.Tensor] = []
        for storage, dtype in storage_obj_list:
            nbytes = storage.nbytes()
            if save_size:
                pieces.append(struct.pack("<q", nbytes // dtype.itemsize))
            pieces.append(_bytes_of(storage))
        begin, end = _part(sum(map(len, pieces)), self._writers, self._rank)
        at = 0
        for piece in pieces:
            inside = piece[max(begin - at, 0) : max(end - at, 0)]
            if isinstance(inside, bytes):
                self.write(inside) if inside else None
            elif len(inside):
                self._write_tensor(inside)
            at += len(piece)
        self._incr_stats(SAVE_STORAGE_KEY, len(storage_obj_list))
        self._incr_stats(SAVE_STORAGE_BYTES_KEY, end - begin)
        return end - begin

    def flush(self) -> None:
        """Wait until all that was written is in the file."""
        super().flush()
        if not self.closed:
            self._drain()

    def close(self) -> None:
        """Flush, have the drive make it stable (as DeepSpeed's does), and close. The file is closed also if that raises."""
        if self.closed:
            if self._sending:  # since a close() that was interrupted
                self._wait()
            return
        if self._file is None or self._file.closed:  # by a close() that was interrupted
            super().close()
            return
        try:
            with self._file:  # closed whatever happens, so that nothing is written to its number when another file has that
                try:
                    super().close()  # which flushes
                finally:
                    self._wait()
                os.fsync(self._file.fileno())
        except OSError as error:
            if error.filename is None:
                raise OSError(error.errno, error.strerror, os.fspath(self._file_path)) from error
            raise

    def _open_file(self) -> io.FileIO:
        if self.closed or self._file is None:
            raise ValueError("the file is closed")
        return self._file

    def _room(self) -> int:
        """Bytes until the half ends: on a page of the file, so that the next one begins on one."""
        return self._size - self._begin % PAGE - self._filled

    def _fill_from(self, piece: memoryview) -> None:
        began = time.perf_counter()
        half = self._halves[0]
        if half.device.type == "cpu":
            with memory_of(half, self._filled, len(piece)) as room:
                room[:] = piece
        else:
            import torch

            half[self._filled : self._filled + len(piece)].copy_(torch.frombuffer(bytearray(piece), dtype=half.dtype))
        self._count_fill(began)

    def _write_tensor(self, source: torch.Tensor) -> None:
        began = time.perf_counter()
        taken = 0
        while taken < len(source):
            count = min(self._room(), len(source) - taken)
            filling = time.perf_counter()
            half = self._halves[0].view(source.dtype)
            half[self._filled : self._filled + count].copy_(source[taken : taken + count])
            self._count_fill(filling)
            self._advance(count)
            taken += count
        self._wrote(taken, time.perf_counter() - began)

    def _advance(self, count: int) -> None:
        self._filled += count
        if not self._room():
            self._start()
            self._begin += self._filled
            self._filled = self._flushed = 0
            self._halves.reverse()
            if len(self._halves) == 1:
                self._wait()

    def _drain(self) -> None:
        """Have all in the file, and keep of it what does not fill a page: that page is to be written again with what follows."""
        if self._file is None or self._file.closed:
            return
        if self._filled > self._flushed:
            self._start()
        self._wait()
        kept = min((self._begin + self._filled) % PAGE, self._filled)
        done = self._filled - kept
        if done:
            half = self._halves[0]
            half[:kept].copy_(half[done : self._filled].clone())
        self._begin += done
        self._filled = self._flushed = kept

    def _start(self) -> None:
        """Send off what has been filled, once the write before it has ended: then its half can be filled."""
        self._wait()
        began = time.perf_counter()
        self._sending = True
        self._handle.async_pwrite(self._halves[0][: self._filled], self._open_file().fileno(), self._begin)
        self._incr_stats(AIO_WRITE_SEC_KEY, time.perf_counter() - began)
        new = self._filled - self._flushed
        slow = min((self._begin + self._filled) % PAGE, new)
        self._incr_stats(AIO_WRITE_BYTES_KEY, new - slow)
        self._incr_stats(SLOW_WRITE_BYTES_KEY, slow)

    def _wait(self) -> None:
        began = time.perf_counter()
        try:
            self._handle.wait()
        except OSError:  # all have ended, one of them by failing
            self._sending = False
            raise
        self._sending = False
        self._incr_stats(AIO_WRITE_SEC_KEY, time.perf_counter() - began)

    def _count_fill(self, began: float) -> None:
        self._incr_stats(AIO_FILL_BUFFER_SEC_KEY, time.perf_counter() - began)
        self._incr_stats(AIO_FILL_BUFFER_COUNT_KEY)

    def _dump_state(self) -> None:
        self._stats[AIO_SPEED_KEY] = self._speed(AIO_WRITE_BYTES_KEY, AIO_WRITE_SEC_KEY)
        self._stats[AIO_FILL_BUFFER_SPEED_KEY] = self._speed(AIO_WRITE_BYTES_KEY, AIO_FILL_BUFFER_SEC_KEY)
        super()._dump_state()


def _bytes_of(storage: Any) -> torch.Tensor:
    """A view of the bytes of an untyped storage, or of a typed one."""
    import torch

    untyped = getattr(storage, "_untyped_storage", storage)
    return torch.empty(0, dtype=torch.uint8, device=untyped.device).set_(untyped)


def _part(nbytes: int, parts: int, number: int) -> tuple[int, int]:
    """Where one of ``parts`` equal parts begins and ends; the first ones have a byte more where there is a remainder."""
    size, more = divmod(nbytes, parts)
    begin = size * number + min(number, more)
    return begin, begin + size + (number < more)
