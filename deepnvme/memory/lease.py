"""Leases: pinned memory that a pool has lent, and the transfers after which a lease can be released."""

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
    """A read, a write or a copy in progress: ``deepnvme.Future``, ``concurrent.futures.Future`` and the like.

    ``done()`` must become True even if nobody waits. When a lease is released after a transfer, the pool calls
    ``exception()`` only once ``done()`` is True, and only if the transfer still keeps the memory alive.
    """

    def done(self) -> bool:
        """Return whether the transfer has ended, with or without an error. Never blocks."""

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait until the transfer has ended, and return its error or None. Raises TimeoutError after ``timeout`` seconds."""


class Lease:
    """Pinned memory borrowed from a :class:`BufferPool` by :meth:`BufferPool.lease`. Usable as a context manager.

    The pool lends the memory again only when the lease is released or dropped *and* no tensor over the memory is alive. So a
    view that is kept stays valid, and counts against the budget until it is gone. A transfer of :class:`deepnvme.Engine`
    keeps the tensor's storage alive, so releasing the lease cannot disturb it. Work that does not keep a storage alive, such
    as a copy by a device, must end before the release, or be passed to :meth:`release` as ``after``.
    """

    __slots__ = ("__weakref__", "_awaited", "_buffer", "_chunk", "nbytes")

    def __init__(self, buffer: torch.Tensor, chunk: PinnedChunk, awaited: dict[PinnedChunk, Transfer]) -> None:
        self._buffer: torch.Tensor | None = buffer
        self._chunk = chunk
        self._awaited = awaited  # the pool's: what it takes chunks back after
        self.nbytes = buffer.nbytes
        """Bytes requested, without padding."""

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
            ValueError: If ``offset`` is not such a multiple, if the view ends past the buffer, or after release.
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
            after: If given, the memory is given back when this transfer has ended, with or without an error.
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
    """A transfer that is done when a CUDA device has finished the work queued on its current stream before this was made.

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
