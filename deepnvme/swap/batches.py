"""Many tensors in few requests: those that are neighbours in a file go together."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from deepnvme.engine import Engine, File, Future

from .buffers import BufferPool, Lease
from .extents import padded
from .futures import Operation
from .memory import flat_bytes

if TYPE_CHECKING:
    import torch

GATHERED_BELOW = 512 << 10
"""Bytes of a request that is not worth copying together with others."""
_CHUNK = 4 << 20
_CHUNKS = 4
"""Bytes, and how many chunks: a drive is busy with three while the fourth is filled."""
_RUN = 16 << 20
"""Bytes of a buffer that tensors are read into together, and that lives for as long as one of them."""


class Item(NamedTuple):
    """A tensor, or what will be one, that lies in one extent."""

    file: int
    offset: int
    nbytes: int
    subject: Any
    """What an operation's failures name."""
    tensor: Any = None
    """Contiguous; None for one that is to be read."""
    address: int = 0
    """In host memory; 0 for a tensor on a device."""


def neighbours(items: Iterable[Item], limit: int = _RUN) -> Iterator[list[Item]]:
    """The items by their place in the files, in runs without gaps of at most ``limit`` bytes, or of one item."""
    run: list[Item] = []
    start = end = 0
    file = -1
    for item in sorted(items, key=_place):
        length = padded(item.nbytes)
        if item.file != file or item.offset != end or end + length - start > limit:
            if run:
                yield run
            run = []
            file, start, end = item.file, item.offset, item.offset
        run.append(item)
        end += length
    if run:
        yield run


def write(engine: Engine, pool: BufferPool, files: Sequence[File], items: Sequence[Item], operation: Operation) -> None:
    """Start writing the items, and add the transfers to the operation.

    Those that are neighbours in memory as well are one request. Small ones are copied into leased buffers as they lie in the
    file; where the pool has none to spare, each is a request of its own. Blocks while more than four buffers are under way.
    """
    alone = len(items) == 1
    small = []
    for segment in _segments(items):
        nbytes = segment[-1].address + segment[-1].nbytes - segment[0].address if len(segment) > 1 else segment[0].nbytes
        if alone or nbytes >= GATHERED_BELOW or segment[0].address == 0:
            first = segment[0]
            operation.add(engine.write(_span(segment, nbytes), files[first.file], first.offset), _subjects(segment))
        else:
            small += segment
    if small:
        _Gathering(engine, pool, files, operation).write(small)


def _segments(items: Sequence[Item]) -> Iterator[list[Item]]:
    """The items by their place in the files, in segments whose bytes follow each other in the file and in memory."""
    segment: list[Item] = []
    for item in sorted(items, key=_place):
        if segment and _follows(segment[-1], item):
            segment.append(item)
            continue
        if segment:
            yield segment
        segment = [item]
    if segment:
        yield segment


def _follows(before: Item, item: Item) -> bool:
    return (
        item.address != 0
        and item.address == before.address + before.nbytes
        and item.offset == before.offset + before.nbytes
        and item.file == before.file
        and item.tensor.untyped_storage().data_ptr() == before.tensor.untyped_storage().data_ptr()
    )


def _span(segment: Sequence[Item], nbytes: int) -> torch.Tensor:
    """One tensor over the memory of all."""
    first: torch.Tensor = segment[0].tensor
    if len(segment) == 1:
        return first
    import torch

    storage = first.untyped_storage()
    bytes_of_storage = torch.empty(0, dtype=torch.uint8).set_(storage)
    start = segment[0].address - storage.data_ptr()
    return bytes_of_storage[start : start + nbytes]


class _Gathering:
    """Leased chunks in turn: each is filled, written, and filled again when that has ended."""

    def __init__(self, engine: Engine, pool: BufferPool, files: Sequence[File], operation: Operation) -> None:
        self._engine = engine
        self._pool = pool
        self._files = files
        self._operation = operation
        self._under_way: deque[tuple[Lease, Transfers]] = deque()

    def write(self, items: Sequence[Item]) -> None:
        """``items``: on the host, in the order of their places."""
        size = min(_CHUNK, sum(padded(item.nbytes) for item in items))
        at = 0
        try:
            while at < len(items):
                lease = self._lease(size)
                if lease is None:
                    for item in items[at:]:
                        self._operation.add(self._engine.write(item.tensor, self._files[item.file], item.offset), (item.subject,))
                    return
                sent = Transfers([])
                try:
                    at = self._fill(lease, items, at, sent)
                finally:
                    self._under_way.append((lease, sent))
        finally:
            for lease, sent in self._under_way:
                lease.release(after=sent)

    def _lease(self, size: int) -> Lease | None:
        """Waits for nobody but the drive: who else holds buffers may wait for this thread."""
        lease = self._pool.try_lease(size) if len(self._under_way) < _CHUNKS else None
        if lease is None and self._under_way:
            lease, sent = self._under_way.popleft()
            sent.exception()
        return lease

    def _fill(self, lease: Lease, items: Sequence[Item], at: int, sent: Transfers) -> int:
        """Copy items from the one at ``at`` on, start writing them, and return where the next chunk begins."""
        base = lease.buffer.data_ptr()
        size = lease.nbytes
        filled = run_start = 0
        run: list[Item] = []
        while at < len(items):
            item = items[at]
            length = padded(item.nbytes)
            if filled + length > size:
                break
            if run and (item.offset != run[0].offset + filled - run_start or item.file != run[0].file):
                self._send(lease, run_start, filled, run, sent)
                run, run_start = [], filled
            ctypes.memmove(base + filled, item.address, item.nbytes)
            if length > item.nbytes:
                ctypes.memset(base + filled + item.nbytes, 0, length - item.nbytes)  # nobody else's bytes
            run.append(item)
            filled += length
            at += 1
        self._send(lease, run_start, filled, run, sent)
        return at

    def _send(self, lease: Lease, start: int, stop: int, run: Sequence[Item], sent: Transfers) -> None:
        transfer = self._engine.write(lease.buffer[start:stop], self._files[run[0].file], run[0].offset)
        sent.add(transfer)
        self._operation.add(transfer, _subjects(run))


class Transfers:
    """Several futures as one, as far as a lease asks."""

    def __init__(self, futures: list[Future]) -> None:
        self._futures = futures

    def add(self, future: Future) -> None:
        self._futures.append(future)

    def done(self) -> bool:
        return all(future.done() for future in self._futures)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        errors = [future.exception(timeout) for future in self._futures]
        return next((error for error in errors if error is not None), None)


def tensor_in(memory: torch.Tensor, offset: int, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """The tensor at ``offset`` bytes into contiguous bytes; offset and start of the memory suit the dtype."""
    strides = []
    stride = 1
    for size in reversed(shape):
        strides.append(stride)
        stride *= max(size, 1)
    base = memory.view(dtype)
    return base.as_strided(shape, strides[::-1], base.storage_offset() + offset // dtype.itemsize)


def bytes_under(tensor: torch.Tensor, start: int, length: int) -> torch.Tensor:
    """A view of a part of a contiguous tensor's bytes; the tensor itself if it is all."""
    if start == 0 and length == tensor.nbytes:
        return tensor
    return flat_bytes(tensor)[start : start + length]


def _place(item: Item) -> tuple[int, int]:
    return item[0], item[1]


def _subjects(items: Sequence[Item]) -> list[Any]:
    return [item.subject for item in items]
