"""Leases: pinned memory that a pool has lent, and what they can be released after."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from .chunks import PinnedChunk


class Transfer(Protocol):
    """A read, a write or a copy under way: ``deepnvme.Future``, ``concurrent.futures.Future`` and the like.

    ``done()`` must turn True without anybody waiting. If a lease is released after it, ``exception()`` is called only when it is
    done, and only if it still keeps the memory alive.
    """

    def done(self) -> bool:
        """Return whether it has ended, well or not. Never blocks."""

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait, and return the error that it ended with, or None. Raises TimeoutError."""


class Lease:
    """Pinned memory borrowed from a :class:`BufferPool` by :meth:`BufferPool.lease`. As a context manager, it releases itself.

    The memory is lent again only when the lease is released or dropped *and* no tensor over it is alive. So a view that was kept
    stays valid, and counts against the budget until it is gone. A transfer of :class:`deepnvme.Engine` keeps the tensor's
    storage, and so is never disturbed. Work that does not keep one, such as a copy that a device makes, must end before the
    release, or be passed to :meth:`release` as ``after``.
    """

    __slots__ = ("__weakref__", "_awaited", "_buffer", "_chunk", "nbytes")

    def __init__(self, buffer: torch.Tensor, chunk: PinnedChunk, awaited: dict[PinnedChunk, Transfer]) -> None:
        self._buffer: torch.Tensor | None = buffer
        self._chunk = chunk
        self._awaited = awaited  # the pool's: what it takes chunks back after
        self.nbytes = buffer.nbytes
        """Bytes, as asked for."""

    @property
    def buffer(self) -> torch.Tensor:
        """The memory as a one-dimensional uint8 tensor of ``nbytes`` elements, aligned to 4096 bytes. Its contents are undefined.

        Raises:
            ValueError: After release.
        """
        if self._buffer is None:
            raise ValueError(f"the lease of {self.nbytes} bytes was released: use its buffer before, or lease again")
        return self._buffer

    def tensor(self, shape: int | Sequence[int], dtype: torch.dtype, offset: int = 0) -> torch.Tensor:
        """Return a view of the buffer with this shape and dtype.

        Args:
            shape: Shape of the view.
            dtype: Any dtype.
            offset: Bytes from the start of the buffer; a multiple of the dtype's size.

        Raises:
            ValueError: For another offset, a view that ends past the buffer, or after release.
        """
        sizes = (operator.index(shape),) if not isinstance(shape, Sequence) else tuple(map(operator.index, shape))
        end = offset + math.prod(sizes) * dtype.itemsize
        if offset % dtype.itemsize or offset < 0:
            raise ValueError(f"offset must be a multiple of {dtype.itemsize} bytes, the size of {dtype}, got {offset}")
        if end > self.nbytes or any(size < 0 for size in sizes):
            raise ValueError(f"a tensor of {sizes} {dtype} at offset {offset} must fit in the lease of {self.nbytes} bytes")
        return self.buffer[offset:end].view(dtype).view(sizes)

    def release(self, after: Transfer | None = None) -> None:
        """Give the memory back to the pool. Never blocks. Idempotent: only the first call counts.

        May be called by any thread, and by finalizers.

        Args:
            after: If given, the memory is given back when this has ended, well or not.
        """
        if self._buffer is None:
            return
        if after is not None:
            self._awaited[self._chunk] = after
        self._chunk.thread = None
        self._buffer = None  # last: from now on, the memory may be lent again

    def __del__(self) -> None:
        if hasattr(self, "_buffer"):  # not if __init__ was never called
            self.release()

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()

    def __repr__(self) -> str:
        return f"<Lease of {self.nbytes} bytes{', released' if self._buffer is None else ''}>"


class Computed:
    """Done when a CUDA device's current stream has finished all work that was queued on it before this was made.

    A lease can be released after it: see :meth:`Lease.release`.

    Attributes:
        event: The CUDA event, for which another stream can wait.
    """

    def __init__(self, device: torch.device) -> None:
        import torch

        self.event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.event.record(torch.cuda.current_stream(device))

    def done(self) -> bool:
        """Return whether the work is finished. Never blocks."""
        return bool(self.event.query())  # type: ignore[no-untyped-call]

    def exception(self, timeout: float | None = None) -> None:
        """Return None. Errors on a device are raised by later calls that use the device."""
