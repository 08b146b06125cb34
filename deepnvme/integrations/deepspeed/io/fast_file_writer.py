"""A file object for ``torch.save`` that collects bytes in pinned memory and writes them with an ``aio_handle``."""

from __future__ import annotations

import io
import os
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from deepnvme._files import naming_file
from deepnvme.memory.alignment import PAGE
from deepnvme.memory.tensor_bytes import flat_bytes, memory_of

from . import constants
from .file_writers import BaseFileWriter

_Source = TypeVar("_Source", memoryview, "torch.Tensor")

SMALLEST_TENSOR = 2 * PAGE
"""Least bytes of a ``pinned_tensor`` with double buffering: one page for each half."""
_COUNTED = (
    constants.AIO_WRITE_SEC_KEY,
    constants.AIO_WRITE_BYTES_KEY,
    constants.AIO_SPEED_KEY,
    constants.SLOW_WRITE_BYTES_KEY,
    constants.SLOW_WRITE_SEC_KEY,
    constants.AIO_FILL_BUFFER_COUNT_KEY,
    constants.AIO_FILL_BUFFER_SEC_KEY,
    constants.AIO_FILL_BUFFER_SPEED_KEY,
    constants.SAVE_STORAGE_KEY,
    constants.SAVE_STORAGE_BYTES_KEY,
)


@dataclass
class FastFileWriterConfig:
    """Options of a :class:`FastFileWriter`: its handle, its pinned memory, and its share of the work.

    Contract: DeepSpeed 0.19, ``io/fast_file_writer.py``.
    """

    dnvme_handle: Any
    """An ``aio_handle``, or a ``gds_handle`` with a tensor on its device. Not to be used otherwise until the file is closed."""
    pinned_tensor: torch.Tensor
    """A contiguous tensor of bytes in the handle's locked memory. Not to be touched until the file is closed."""
    double_buffer: bool = True
    """Whether to fill one half of the tensor while the other half is being written."""
    num_parallel_writers: int = 1
    """How many writers share a list of storages: see :meth:`FastFileWriter.save_torch_storage_object_list`."""
    writer_rank: int = 0
    """This writer's number among ``num_parallel_writers``, from 0."""
    global_rank: int = 0
    """The process's rank. DeepSpeed uses it in logs only; ignored here."""


class FastFileWriter(BaseFileWriter):
    """A file object that copies bytes into a pinned tensor and writes them to the drive in the background.

    The file is created, or emptied. ``write`` blocks only while the tensor is full. As with DeepSpeed's writer, bytes are in the
    file after :meth:`flush`, and on stable storage after :meth:`close`. Not thread-safe.

    In the statistics, "slow" bytes are those in partly written pages, which go through the page cache. Their time is included in
    the time of all writes.

    Contract: DeepSpeed 0.19, ``io/fast_file_writer.py``.

    Args:
        file_path: The file to write.
        config: The handle, the pinned tensor and other options.

    Raises:
        ValueError: If the tensor is too small, not contiguous or not of one-byte elements, or ``writer_rank`` is out of range.
        OSError: If the file cannot be opened. A write that failed in the background is raised by the next ``write``, ``seek``,
            ``flush`` or ``close``.
    """

    def __init__(self, file_path: str | os.PathLike[str], config: FastFileWriterConfig) -> None:
        super().__init__(file_path)
        self._file: io.FileIO | None = None  # until it is opened below, close() has nothing to do
        self._sending = False  # whether a write of this object may be in flight on the handle
        self._stats |= dict.fromkeys(_COUNTED, 0)
        tensor = config.pinned_tensor
        halves = 2 if config.double_buffer else 1
        self._size = tensor.nbytes // halves // PAGE * PAGE  # whole pages bypass the page cache
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
        self._filled = 0  # bytes in the first of the halves
        self._flushed = 0  # how many of these are written already
        self._file = io.FileIO(os.fspath(file_path), "w")

    def seekable(self) -> bool:
        """Return True: the file object has :meth:`seek`."""
        return True

    def tell(self) -> int:
        """Return the position in the file, in bytes."""
        return self._begin + self._filled

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Flush, and move to another position in the file. Blocks. Past the end, the gap is filled with zeros.

        Args:
            offset: Bytes from ``whence``.
            whence: ``os.SEEK_SET``, ``os.SEEK_CUR`` or ``os.SEEK_END``.

        Returns:
            The new position, in bytes.

        Raises:
            ValueError: If the position would be negative, ``whence`` is another number, or the file is closed.
            OSError: From an earlier write.
        """
        self._open_file()
        self._drain()
        starts = {os.SEEK_SET: 0, os.SEEK_CUR: self.tell(), os.SEEK_END: os.fstat(self._open_file().fileno()).st_size}
        if whence not in starts:
            raise ValueError(f"whence must be 0, 1 or 2, got {whence}")
        offset += starts[whence]
        if offset < 0:
            raise ValueError(f"the position must not be negative, got {offset}")
        self._begin, self._filled, self._flushed = offset, 0, 0
        return offset

    def write(self, data: Any) -> int:
        """Copy all of ``data``, an object with the buffer protocol, and return its length in bytes.

        Blocks only while the pinned tensor is full. Raises ValueError if the file is closed, OSError from an earlier write.
        """
        self._open_file()
        with memoryview(data) as given, given.cast("B") as source:
            self._fill(source, self._copy_bytes)
            return len(source)

    def save_torch_storage_object_list(self, storage_obj_list: Sequence[tuple[Any, torch.dtype]], save_size: bool) -> int:
        """Write storages one after the other, or this writer's part of them.

        With ``num_parallel_writers`` above 1, the bytes are divided into as many parts, and this writer writes only part number
        ``writer_rank`` to its own file. The writers' files in order make up the whole. If the bytes cannot be divided equally,
        the first parts are a byte longer.

        Args:
            storage_obj_list: (storage, dtype of its elements). Storages may be on a device.
            save_size: Whether to write each storage's number of elements before it, as 8 bytes in little-endian order, as in
                torch's older file format.

        Returns:
            The number of bytes that this writer has written.
        """
        self._open_file()
        pieces: list[bytes | torch.Tensor] = []
        for storage, dtype in storage_obj_list:
            nbytes = storage.nbytes()
            if save_size:
                pieces.append(struct.pack("<q", nbytes // dtype.itemsize))
            pieces.append(flat_bytes(getattr(storage, "_untyped_storage", storage)))
        begin, end = _part(sum(map(len, pieces)), self._writers, self._rank)
        at = 0
        for piece in pieces:
            inside = piece[max(begin - at, 0) : max(end - at, 0)]
            if isinstance(inside, bytes):
                self.write(inside) if inside else None
            elif len(inside):
                self._fill(inside, self._copy_tensor)
            at += len(piece)
        self._incr_stats(constants.SAVE_STORAGE_KEY, len(storage_obj_list))
        self._incr_stats(constants.SAVE_STORAGE_BYTES_KEY, end - begin)
        return end - begin

    def flush(self) -> None:
        """Wait until all bytes written so far are in the file. Raises OSError."""
        super().flush()
        if not self.closed:
            self._drain()

    def close(self) -> None:
        """Flush, make the file stable on the drive as DeepSpeed's writer does, and close it. Blocks. Idempotent.

        The file is closed even if this raises OSError.
        """
        if self.closed:
            if self._sending:  # an earlier close() was interrupted
                self._wait()
            return
        if self._file is None or self._file.closed:  # never opened, or an earlier close() was interrupted
            super().close()
            return
        # The file is always closed, so that no write goes to this descriptor when another file has its number.
        with naming_file(self._file_path), self._file:
            try:
                super().close()  # calls flush()
            finally:
                self._wait()
            os.fsync(self._file.fileno())

    def _open_file(self) -> io.FileIO:
        """Return the file. Raises ValueError if it is closed."""
        if self.closed or self._file is None:
            raise ValueError("the file is closed")
        return self._file

    def _room(self) -> int:
        """Return the bytes left in this half. It ends on a page of the file, so that the next half begins on one."""
        return self._size - self._begin % PAGE - self._filled

    def _fill(self, source: _Source, copy: Callable[[_Source, int, int], None]) -> None:
        """Copy all bytes into the halves. When one is full, start writing it and go on with the other.

        ``copy(source, begin, count)`` copies the bytes from ``begin`` on to the end of what is in the first of the halves.
        """
        began = time.perf_counter()
        nbytes = len(source)
        taken = 0
        while taken < nbytes:
            count = min(self._room(), nbytes - taken)
            filling = time.perf_counter()
            copy(source, taken, count)
            self._incr_stats(constants.AIO_FILL_BUFFER_SEC_KEY, time.perf_counter() - filling)
            self._incr_stats(constants.AIO_FILL_BUFFER_COUNT_KEY)
            self._filled += count
            taken += count
            if not self._room():
                self._start()
                self._begin += self._filled
                self._filled = self._flushed = 0
                self._halves.reverse()
                if len(self._halves) == 1:
                    self._wait()
        self._wrote(nbytes, time.perf_counter() - began)

    def _copy_bytes(self, source: memoryview, begin: int, count: int) -> None:
        """Copy ``count`` bytes of an object with the buffer protocol: see :meth:`_fill`."""
        half = self._halves[0]
        with source[begin : begin + count] as piece:
            if half.device.type == "cpu":
                with memory_of(half, self._filled, count) as room:
                    room[:] = piece
            else:
                half[self._filled : self._filled + count].copy_(torch.frombuffer(bytearray(piece), dtype=half.dtype))

    def _copy_tensor(self, source: torch.Tensor, begin: int, count: int) -> None:
        """Copy ``count`` bytes of a tensor of bytes, on any device: see :meth:`_fill`."""
        half = self._halves[0].view(source.dtype)
        half[self._filled : self._filled + count].copy_(source[begin : begin + count])

    def _drain(self) -> None:
        """Write everything, and wait. The last, partly filled page is kept, to be written again with the bytes that follow."""
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
        """Wait for the write before, whose half is then free, and start writing the half that has been filled."""
        self._wait()
        began = time.perf_counter()
        self._sending = True
        self._handle.async_pwrite(self._halves[0][: self._filled], self._open_file().fileno(), self._begin)
        self._incr_stats(constants.AIO_WRITE_SEC_KEY, time.perf_counter() - began)
        new = self._filled - self._flushed
        slow = min((self._begin + self._filled) % PAGE, new)
        self._incr_stats(constants.AIO_WRITE_BYTES_KEY, new - slow)
        self._incr_stats(constants.SLOW_WRITE_BYTES_KEY, slow)

    def _wait(self) -> None:
        """Wait for the writes in flight. Raises the OSError of one that failed."""
        began = time.perf_counter()
        try:
            self._handle.wait()
        except OSError:  # all writes have ended, and at least one failed
            self._sending = False
            raise
        self._sending = False
        self._incr_stats(constants.AIO_WRITE_SEC_KEY, time.perf_counter() - began)

    def _dump_state(self) -> None:
        """Print the statistics, with the speeds of filling the tensor and of writing from it."""
        written, filling = constants.AIO_WRITE_BYTES_KEY, constants.AIO_FILL_BUFFER_SEC_KEY
        self._stats[constants.AIO_SPEED_KEY] = self._speed(written, constants.AIO_WRITE_SEC_KEY)
        self._stats[constants.AIO_FILL_BUFFER_SPEED_KEY] = self._speed(written, filling)
        super()._dump_state()


def _part(nbytes: int, parts: int, number: int) -> tuple[int, int]:
    """Return where part ``number`` of ``parts`` equal parts begins and ends; the first parts get a remainder's bytes."""
    size, more = divmod(nbytes, parts)
    begin = size * number + min(number, more)
    return begin, begin + size + (number < more)
