"""A file to write to in sequence, for ``torch.save`` and the like, whose bytes go to the drive from pinned memory."""

from __future__ import annotations

import io
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from deepnvme._tensor_memory import memory_of

if TYPE_CHECKING:
    import torch

_PAGE = 4096
SMALLEST_TENSOR = 2 * _PAGE
"""Bytes of a ``pinned_tensor`` that is used in halves."""


@dataclass(frozen=True)
class FastFileWriterConfig:
    """Contract: DeepSpeed 0.19, ``io/fast_file_writer.py``."""

    dnvme_handle: Any
    """An ``aio_handle`` that has nothing else to do meanwhile."""
    pinned_tensor: torch.Tensor
    """Dense bytes of the handle's locked memory; not to be touched before the file is closed."""
    double_buffer: bool = True
    """Fill one half of the tensor while the other is being written."""


class FastFileWriter(io.RawIOBase):
    """Opens ``file_path`` for writing, empty. ``write`` copies into the pinned tensor and blocks only while that is full.

    What is written is in the file after :meth:`flush`, and on stable storage after :meth:`close`, as with DeepSpeed's.
    Not seekable, and without a ``fileno``. Raises ValueError for a tensor too small or of another type, OSError from opening and,
    for a write that failed behind, from the next ``write``, ``flush`` or ``close``. Not thread-safe.
    """

    def __init__(self, file_path: str | os.PathLike[str], config: FastFileWriterConfig) -> None:
        super().__init__()
        self._descriptor = -1  # none: nothing to flush or close
        tensor = config.pinned_tensor
        halves = 2 if config.double_buffer else 1
        self._size = tensor.nbytes // halves // _PAGE * _PAGE  # whole pages go past the page cache
        if tensor.element_size() != 1 or not tensor.is_contiguous() or self._size == 0:
            raise ValueError(
                f"pinned_tensor must be contiguous bytes, at least {halves * _PAGE} of them, "
                f"got {tensor.nbytes} bytes of {tensor.dtype}"
            )
        self._handle = config.dnvme_handle
        self._halves = [tensor.view(-1)[half * self._size : (half + 1) * self._size] for half in range(halves)]
        self._filled = 0  # bytes in the first of the halves
        self._written = 0  # bytes given to the handle
        self._descriptor = os.open(file_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        # torch's old file format would write to it past this object, at another position. DeepSpeed's returns -1.
        raise io.UnsupportedOperation("what is written has to go through the pinned tensor")

    def tell(self) -> int:
        return self._written + self._filled

    def write(self, data: Any) -> int:
        """Take all of ``data``, anything with the buffer protocol, and return its length in bytes."""
        if self.closed:
            raise ValueError("the file is closed")
        with memoryview(data) as given, given.cast("B") as source:
            taken = 0
            while taken < len(source):
                count = min(self._size - self._filled, len(source) - taken)
                with source[taken : taken + count] as piece, memory_of(self._halves[0], self._filled, count) as room:
                    room[:] = piece
                self._filled += count
                taken += count
                if self._filled == self._size:
                    self._start()
            return len(source)

    def flush(self) -> None:
        """Wait until all that was written is in the file."""
        if self.closed or self._descriptor < 0:
            return
        if self._filled:
            self._start()
        self._handle.wait()

    def close(self) -> None:
        """Flush, have the drive make it stable (as DeepSpeed's does), and close. The file is closed also if that raises."""
        if self.closed:
            return
        try:
            super().close()  # which flushes
            if self._descriptor >= 0:
                os.fsync(self._descriptor)
        finally:
            if self._descriptor >= 0:
                os.close(self._descriptor)

    def _start(self) -> None:
        """Send off what has been filled, once the write before it has ended: then its half can be filled."""
        self._handle.wait()
        self._handle.async_pwrite(self._halves[0][: self._filled], self._descriptor, self._written)
        self._written += self._filled
        self._filled = 0
        self._halves.reverse()
        if len(self._halves) == 1:
            self._handle.wait()
