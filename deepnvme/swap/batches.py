"""Many tensors in few requests: those that are neighbours in a file go together."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from deepnvme.engine import Engine, File, Future

from .buffers import BufferPool, Lease
from .extents import padded
from .futures import Operation
from .memory import empty_aligned, flat_bytes
from .space import Part

if TYPE_CHECKING:
    import torch

GATHERED_BELOW = 512 << 10
"""Bytes of a request that is not worth copying together with others."""
_CHUNK = 4 << 20
_CHUNKS = 4
"""Bytes, and how many chunks: a drive is busy with three while the fourth is filled."""
_RUN = 16 << 20
"""Bytes of a buffer that tensors are read into together, and that lives for as long as one of them."""


def neighbours(parts: Sequence[Part], limit: int = _RUN) -> Iterator[list[int]]:
    """Indices of the parts by their place in the files, in runs without gaps of at most ``limit`` bytes, or of one part."""
    run: list[int] = []
    start = end = 0
    file = -1
    for index in sorted(range(len(parts)), key=parts.__getitem__):
        part = parts[index]
        length = padded(part.nbytes)
        if part.offset != end or part.file != file or end + length - start > limit:
            if run:
                yield run
            run = []
            file, start, end = part.file, part.offset, part.offset
        run.append(index)
        end += length
    if run:
        yield run


class Writing:
    """Tensors that lie in one extent each. Columns, not rows: the garbage collector is slow with objects by the ten thousand."""

    def __init__(self, engine: Engine, pool: BufferPool, files: Sequence[File], operation: Operation) -> None:
        self._engine = engine
        self._pool = pool
        self._files = files
        self._operation = operation
        self._parts: list[Part] = []
        self._tensors: list[torch.Tensor] = []
        self._addresses: list[int] = []
        self._subjects: list[Any] = []
        self._under_way: deque[tuple[Lease, Transfers]] = deque()

    def add(self, part: Part, tensor: torch.Tensor, subject: Any) -> None:
        """``tensor``: contiguous; ``subject``: what the operation's failures are to name."""
        self._parts.append(part)
        self._tensors.append(tensor)
        self._addresses.append(tensor.data_ptr() if tensor.is_cpu else 0)
        self._subjects.append(subject)

    def start(self) -> None:
        """Start writing, and add the transfers to the operation.

        Tensors that are neighbours in the file and in memory are one request. Other small ones are copied into leased buffers as
        they lie in the file; where the pool has none to spare, each is a request of its own. Blocks while four buffers are under
        way.
        """
        small: list[int] = []
        for segment in self._segments():
            nbytes = sum(self._parts[index].nbytes for index in segment) if len(segment) > 1 else self._parts[segment[0]].nbytes
            if nbytes >= GATHERED_BELOW or self._addresses[segment[0]] == 0:
                self._write(self._span(segment, nbytes), segment)
            else:
                small += segment
        try:
            self._gather(small)
        finally:
            for lease, sent in self._under_way:
                lease.release(after=sent)

    def _write(self, tensor: torch.Tensor, indices: Sequence[int]) -> Future:
        first = self._parts[indices[0]]
        transfer = self._engine.write(tensor, self._files[first.file], first.offset)
        self._operation.add(transfer, [self._subjects[index] for index in indices])
        return transfer

    def _segments(self) -> Iterator[list[int]]:
        """Indices by the place in the files, in segments whose bytes follow each other in the file and in memory."""
        parts, addresses = self._parts, self._addresses
        segment: list[int] = []
        before = -1
        for index in sorted(range(len(parts)), key=parts.__getitem__):
            if before >= 0 and addresses[index] == addresses[before] + parts[before].nbytes and self._follows(index, before):
                segment.append(index)
            else:
                if segment:
                    yield segment
                segment = [index]
            before = index
        if segment:
            yield segment

    def _follows(self, index: int, before: int) -> bool:
        there, here = self._parts[before], self._parts[index]
        return (
            self._addresses[index] != 0
            and (here.file, here.offset) == (there.file, there.offset + there.nbytes)
            and self._tensors[index].untyped_storage().data_ptr() == self._tensors[before].untyped_storage().data_ptr()
        )

    def _span(self, segment: Sequence[int], nbytes: int) -> torch.Tensor:
        """One tensor over the memory of all."""
        first = self._tensors[segment[0]]
        if len(segment) == 1:
            return first
        import torch

        storage = first.untyped_storage()
        start = self._addresses[segment[0]] - storage.data_ptr()
        return torch.empty(0, dtype=torch.uint8).set_(storage)[start : start + nbytes]

    def _gather(self, order: Sequence[int]) -> None:
        """Leased chunks in turn: each is filled, written, and filled again when that has ended."""
        size = min(_CHUNK, sum(padded(self._parts[index].nbytes) for index in order))
        at = 0
        while at < len(order):
            lease = self._lease(size) if len(order) > 1 else None
            if lease is None:
                for index in order[at:]:
                    self._write(self._tensors[index], (index,))
                return
            sent = Transfers()
            self._under_way.append((lease, sent))
            at = self._fill(lease, order, at, sent)

    def _lease(self, size: int) -> Lease | None:
        """Waits for nobody but the drive: who else holds buffers may wait for this thread."""
        lease = self._pool.try_lease(size) if len(self._under_way) < _CHUNKS else None
        if lease is None and self._under_way:
            lease, sent = self._under_way.popleft()
            sent.exception()
        return lease

    def _fill(self, lease: Lease, order: Sequence[int], at: int, sent: Transfers) -> int:
        """Copy tensors from the one at ``at`` on, start writing them, and return where the next chunk begins."""
        buffer = lease.buffer
        base = buffer.data_ptr()
        filled = run_start = 0
        run: list[int] = []
        file = place = -1
        while at < len(order):
            index = order[at]
            part = self._parts[index]
            length = padded(part.nbytes)
            if filled + length > lease.nbytes:
                break
            if run and (part.offset != place or part.file != file):
                sent.add(self._write(buffer[run_start:filled], run))
                run, run_start = [], filled
            ctypes.memmove(base + filled, self._addresses[index], part.nbytes)
            if length > part.nbytes:
                ctypes.memset(base + filled + part.nbytes, 0, length - part.nbytes)  # nobody else's bytes
            run.append(index)
            filled += length
            file, place = part.file, part.offset + length
            at += 1
        sent.add(self._write(buffer[run_start:filled], run))
        return at


class Transfers:
    """Several futures as one, as far as a lease asks."""

    def __init__(self) -> None:
        self._futures: list[Future] = []

    def add(self, future: Future) -> None:
        self._futures.append(future)

    def done(self) -> bool:
        return all(future.done() for future in self._futures)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        errors = [future.exception(timeout) for future in self._futures]
        return next((error for error in errors if error is not None), None)


class Buffer:
    """New memory that several tensors are read into; it lives for as long as one of them."""

    def __init__(self, nbytes: int) -> None:
        self.memory = empty_aligned(nbytes)
        self._seen: dict[torch.dtype, torch.Tensor] = {}

    def tensor(self, offset: int, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        """The tensor ``offset`` bytes into it, a multiple of ALIGNMENT."""
        base = self._seen.get(dtype)
        if base is None:
            base = self._seen[dtype] = self.memory.view(dtype)
        strides = []
        stride = 1
        for size in reversed(shape):
            strides.append(stride)
            stride *= max(size, 1)
        return base.as_strided(shape, strides[::-1], base.storage_offset() + offset // dtype.itemsize)


def pieces(parts: Iterable[Part], tensor: torch.Tensor) -> Iterator[tuple[Part, torch.Tensor]]:
    """The parts with what each holds of the bytes of a contiguous tensor."""
    start = 0
    for part in parts:
        all_of_it = start == 0 and part.nbytes == tensor.nbytes
        yield part, tensor if all_of_it else flat_bytes(tensor)[start : start + part.nbytes]
        start += part.nbytes
