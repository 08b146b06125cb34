"""Pinned memory on loan."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


class Ending(Protocol):
    """What a lease can be released after: ``deepnvme.Future``, ``concurrent.futures.Future`` and the like.

    ``done()`` turns True without anybody waiting for it. ``exception()`` is asked only when it has, and only where the future
    still holds on to the memory.
    """

    def done(self) -> bool: ...

    def exception(self, timeout: float | None = None) -> BaseException | None: ...


class Lease:
    """Pinned memory on loan; made by :meth:`BufferPool.lease`. A context manager, which releases it.

    The memory goes to somebody else once the lease is released or dropped *and* no tensor over it is alive. So a view that was
    kept stays valid, and counts against the budget for as long; and a transfer of :class:`deepnvme.Engine`, which keeps its
    tensor, is never disturbed. What goes on without a tensor, a copy that a device makes say, ends before the release, or is
    what it is told to come ``after``.
    """

    __slots__ = ("__weakref__", "_buffer", "_chunk", "_give_back", "nbytes")

    nbytes: int
    """As asked for."""

    def __init__(self, buffer: torch.Tensor, give_back: Callable[[Ending | None], None], chunk: object = None) -> None:
        self._buffer: torch.Tensor | None = buffer
        self._give_back = give_back
        self._chunk = chunk  # by which its pool knows it
        self.nbytes = buffer.nbytes

    @property
    def buffer(self) -> torch.Tensor:
        """``nbytes`` bytes (uint8, one dimension) from a 4096-byte boundary on, contents undefined. ValueError after release."""
        if self._buffer is None:
            raise ValueError(f"the lease of {self.nbytes} bytes was released: use its buffer before, or lease again")
        return self._buffer

    def tensor(self, shape: int | Sequence[int], dtype: torch.dtype, offset: int = 0) -> torch.Tensor:
        """A view of the buffer. ``offset``: bytes, a multiple of the dtype's size.

        Raises ValueError for another offset, for a tensor that ends past the buffer, and after release.
        """
        sizes = (operator.index(shape),) if not isinstance(shape, Sequence) else tuple(map(operator.index, shape))
        end = offset + math.prod(sizes) * dtype.itemsize
        if offset % dtype.itemsize or offset < 0:
            raise ValueError(f"offset must be a multiple of {dtype.itemsize} bytes, the size of {dtype}, got {offset}")
        if end > self.nbytes or any(size < 0 for size in sizes):
            raise ValueError(f"a tensor of {sizes} {dtype} at offset {offset} must fit in the lease of {self.nbytes} bytes")
        return self.buffer[offset:end].view(dtype).view(sizes)

    def release(self, after: Ending | None = None) -> None:
        """Give the memory back; ``after``: when that has ended, well or not. Never blocks. Idempotent: the first call counts.

        May be called by any thread, and by finalizers.
        """
        if self._buffer is None:
            return
        if after is not None:
            self._give_back(after)  # before the memory is
        self._buffer = None
        if after is None:
            self._give_back(None)

    def __del__(self) -> None:
        if hasattr(self, "_give_back"):  # its making was not interrupted before
            self.release()

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()

    def __repr__(self) -> str:
        return f"<Lease of {self.nbytes} bytes{', released' if self._buffer is None else ''}>"
