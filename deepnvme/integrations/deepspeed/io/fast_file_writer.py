"""A file object for ``torch.save`` that collects bytes in pinned memory and writes them with an ``aio_handle``."""

from __future__ import annotations

import io
import os
from dataclasses import dataclass
from typing import Any

import torch

from deepnvme.files.replacing import with_filename
from deepnvme.memory.alignment import PAGE
from deepnvme.memory.tensor_bytes import memory_of

SMALLEST_TENSOR = 2 * PAGE
"""Smallest size of a ``pinned_tensor`` in bytes, with double buffering: one page for each half."""


@dataclass
class FastFileWriterConfig:
    """Options of a :class:`FastFileWriter`: its handle and its pinned memory.

    Contract: DeepSpeed 0.19, ``io/fast_file_writer.py``.
    """

    dnvme_handle: Any
    """An ``aio_handle``, or a ``gds_handle`` with a tensor on its device. Not to be used otherwise until the file is closed."""
    pinned_tensor: torch.Tensor
    """A contiguous tensor of bytes in the handle's locked memory. Not to be touched until the file is closed."""
    double_buffer: bool = True
    """Whether to fill one half of the tensor while the other half is being written."""
    num_parallel_writers: int = 1
    """Must be 1: several writers share a list of storages only in DeepSpeed's own fork of ``torch.save``."""
    writer_rank: int = 0
    """Ignored, as is ``global_rank``: the one writer writes everything."""
    global_rank: int = 0


class FastFileWriter(io.RawIOBase):
    """A file object that copies bytes into a pinned tensor and writes them to the drive in the background.

    The file is created, or emptied. ``write`` blocks only while the tensor is full. As with DeepSpeed's writer, bytes are in the
    file after :meth:`flush`, and on stable storage after :meth:`close`. Not thread-safe.

    Contract: DeepSpeed 0.19, ``io/fast_file_writer.py``.

    Args:
        file_path: The file to write.
        config: The handle, the pinned tensor and other options.

    Raises:
        ValueError: If the tensor is too small, not contiguous or not of one-byte elements, or there are several writers.
        OSError: If the file cannot be opened. A write that failed in the background is raised by the next ``write``, ``seek``,
            ``flush`` or ``close``.
    """

    def __init__(self, file_path: str | os.PathLike[str], config: FastFileWriterConfig) -> None:
        super().__init__()
        self._file_path = file_path
        self._file: io.FileIO | None = None  # until it is opened below, close() has nothing to do
        self._sending = False  # whether a write of this object may be in flight on the handle
        tensor = config.pinned_tensor
        halves = 2 if config.double_buffer else 1
        self._size = tensor.nbytes // halves // PAGE * PAGE  # whole pages bypass the page cache
        if tensor.element_size() != 1 or not tensor.is_contiguous() or self._size == 0:
            raise ValueError(
                f"pinned_tensor must be contiguous bytes, at least {halves * PAGE} of them, "
                f"got {tensor.nbytes} bytes of {tensor.dtype}"
            )
        if config.num_parallel_writers != 1:
            raise ValueError(
                f"num_parallel_writers must be 1, got {config.num_parallel_writers}: write a file of its own on each rank"
            )
        self._handle = config.dnvme_handle
        self._halves = [tensor.view(-1)[half * self._size : (half + 1) * self._size] for half in range(halves)]
        self._begin = 0  # where in the file the first of the halves begins
        self._filled = 0  # bytes in the first of the halves
        self._flushed = 0  # how many of these are written already
        self._file = io.FileIO(os.fspath(file_path), "w")

    def file_path(self) -> str | os.PathLike[str]:
        """Return the path as it was given."""
        return self._file_path

    def fileno(self) -> int:
        """Return -1, as DeepSpeed's writer does: with a real descriptor, torch's older file format would bypass this object."""
        return -1

    def writable(self) -> bool:
        """Return True: the file object can be written to."""
        return True

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
            self._fill(source)
            return len(source)

    def flush(self) -> None:
        """Wait until all bytes written so far are in the file. Raises OSError. Has no effect after :meth:`close`."""
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
        with with_filename(self._file_path), self._file:
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
        """Return the bytes that still fit into the half being filled. It ends at a page boundary of the file."""
        return self._size - self._begin % PAGE - self._filled

    def _fill(self, source: memoryview) -> None:
        """Copy all bytes into the halves of the pinned tensor. When a half is full, start writing it and fill the other."""
        taken = 0
        while taken < len(source):
            count = min(self._room(), len(source) - taken)
            half = self._halves[0]
            with source[taken : taken + count] as piece:
                if half.device.type == "cpu":
                    with memory_of(half, self._filled, count) as room:
                        room[:] = piece
                else:
                    half[self._filled : self._filled + count].copy_(torch.frombuffer(bytearray(piece), dtype=half.dtype))
            self._filled += count
            taken += count
            if not self._room():
                self._start()
                self._begin += self._filled
                self._filled = self._flushed = 0
                self._halves.reverse()
                if len(self._halves) == 1:
                    self._wait()

    def _drain(self) -> None:
        """Write all bytes copied so far, and wait. A partly filled last page is kept, to be written again with the next bytes."""
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
        """Wait for the previous write, which frees the other half, and start writing the half that has been filled."""
        self._wait()
        self._sending = True
        self._handle.async_pwrite(self._halves[0][: self._filled], self._open_file().fileno(), self._begin)

    def _wait(self) -> None:
        """Wait for the writes in flight. Raises the OSError of one that failed."""
        try:
            self._handle.wait()
        except OSError:  # all writes have ended, and at least one failed
            self._sending = False
            raise
        self._sending = False
