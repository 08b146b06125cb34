"""Writing many tensors to a store's files in few requests: neighbours together, small tensors through leased buffers."""

from __future__ import annotations

import ctypes
import itertools
import operator
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from deepnvme.engine import Engine, File, Future, without_python
from deepnvme.memory.alignment import ALIGNMENT, padded
from deepnvme.memory.pool import BufferPool, Lease
from deepnvme.memory.tensor_bytes import copy_many

from .allocator import Parts, TensorPart, pieces
from .futures import Operation

if TYPE_CHECKING:
    import torch

GATHERED_BELOW = 512 << 10
"""Bytes. Smaller requests are copied into a buffer together with others; for larger ones the copy is not worth it."""
_CHUNK = 4 << 20
_CHUNKS = 4
"""Number of leased chunks of ``_CHUNK`` bytes: a drive is kept busy with three while the fourth is filled."""

_zero_page = ctypes.create_string_buffer(ALIGNMENT)
_ZEROS = ctypes.addressof(_zero_page)


class _Columns(NamedTuple):
    """Tensors that each lie in one extent, in the order of the files, as one list for each property."""

    parts: list[TensorPart]
    tensors: list[torch.Tensor]
    subjects: list[Any]
    """What failures of the operation name, such as catalog entries."""
    addresses: list[int]
    """Addresses on the host; 0 for tensors on devices."""
    sizes: list[int]
    """Bytes of each tensor."""

    def of(self, indices: Sequence[int]) -> _Columns:
        """Return the columns of the tensors with these indices."""
        columns: list[list[Any]] = [[column[index] for index in indices] for column in self]
        return _Columns(*columns)


class Writing:
    """Writes tensors to a store's files.

    Ten thousand tensors have to be prepared in less time than the drive takes to write them. So most work is done a column at a
    time, not a tensor at a time.

    Args:
        engine: Writes the files.
        pool: Leases buffers for small tensors.
        files: The store's files.
        operation: The put, to which the transfers are added.
    """

    def __init__(self, engine: Engine, pool: BufferPool, files: Sequence[File], operation: Operation) -> None:
        self._start_write = without_python(engine.write)
        self._pool = pool
        self._files = files
        self._operation = operation
        self._slots: list[_Slot] = []
        self._next = 0  # index of the slot to fill again next: the one that was filled first

    def start(
        self,
        places: Sequence[Parts],
        tensors: Sequence[torch.Tensor],
        addresses: Sequence[int],
        subjects: Sequence[Any],
    ) -> None:
        """Start writing tensors to their parts, and add the transfers to the operation.

        Tensors that are adjacent both in the file and in memory are written in one request. Other small ones are copied into
        leased buffers, in the order of the file; if the pool has no buffer free, each is a request of its own. Blocks while four
        buffers are under way.

        Args:
            places: The parts of each tensor.
            tensors: Contiguous tensors.
            addresses: Address of each tensor on the host, 0 for tensors on devices.
            subjects: What the operation's failures are to name for each tensor.
        """
        whole = [index for index, parts in enumerate(places) if len(parts) == 1]
        if len(whole) < len(places):
            for parts, tensor, subject in zip(places, tensors, subjects, strict=True):
                for part, piece in pieces(parts, tensor) if len(parts) > 1 else ():
                    self._write(piece, part, (subject,))
        whole.sort(key=places.__getitem__)
        extents = [places[index][0] for index in whole]
        columns = _Columns(
            extents,
            [tensors[index] for index in whole],
            [subjects[index] for index in whole],
            [addresses[index] for index in whole],
            [nbytes for _, _, nbytes in extents],
        )
        try:
            self._gather(self._write_large(columns))
            self._release()
        except BaseException:
            self._release()
            raise

    def _release(self) -> None:
        """Release the leased buffers when the writes from them have ended."""
        for slot in self._slots:
            if slot.lease is not None:
                slot.lease.release(after=slot.sent)

    def _write(self, tensor: torch.Tensor, part: TensorPart, subjects: Sequence[Any]) -> None:
        """Start writing one tensor to one part."""
        self._write_all([tensor], [part], [subjects])

    def _write_all(
        self, tensors: Sequence[torch.Tensor], parts: Sequence[TensorPart], subjects: Iterable[Sequence[Any]]
    ) -> Transfers:
        """Start writing tensors, each to one part. Return the transfers."""
        files = [self._files[part.file] for part in parts]
        offsets = [part.offset for part in parts]
        return Transfers(self._operation.submit(self._start_write, tensors, files, offsets, subjects=subjects))

    def _write_large(self, columns: _Columns) -> _Columns:
        """Start writing large tensors, and adjacent ones that are large together. Return the small ones that are left."""
        parts, tensors, subjects, addresses, sizes = columns
        joined = _joined(columns)
        if not joined and max(sizes, default=0) < GATHERED_BELOW and 0 not in addresses:
            return columns
        small: list[int] = []
        bounds = [index for index in range(len(parts) + 1) if index not in joined]
        for begin, end in itertools.pairwise(bounds):
            nbytes = sum(sizes[begin:end])
            if nbytes >= GATHERED_BELOW or addresses[begin] == 0:
                tensor = tensors[begin] if end == begin + 1 else _span(tensors[begin], nbytes)
                self._write(tensor, parts[begin], subjects[begin:end])
            else:
                small.extend(range(begin, end))
        return columns.of(small)

    def _gather(self, columns: _Columns) -> None:
        """Copy small tensors into leased chunks and write these. A chunk is filled again when the write from it has ended."""
        parts, tensors, subjects, addresses, sizes = columns
        lengths = list(map(padded, sizes))
        ends = list(itertools.accumulate(lengths))
        files = [file for file, _, _ in parts]
        offsets = [offset for _, offset, _ in parts]
        following = list(map(operator.add, offsets, lengths))
        gaps = [i for i in range(1, len(parts)) if offsets[i] != following[i - 1] or files[i] != files[i - 1]]
        size = min(_CHUNK, sum(lengths))
        begin = 0
        while begin < len(parts):
            slot = self._free_slot(size) if len(parts) > 1 else None
            if slot is None or slot.lease is None:
                self._write_all(tensors[begin:], parts[begin:], zip(subjects[begin:], strict=True))
                return
            buffer = slot.lease.buffer
            start = ends[begin] - lengths[begin]
            end = bisect_right(ends, start + size, begin)
            _fill(buffer.data_ptr(), addresses[begin:end], sizes[begin:end], lengths[begin:end])
            runs = list(itertools.pairwise((begin, *gaps[bisect_right(gaps, begin) : bisect_left(gaps, end)], end)))
            slot.sent = self._write_all(
                [buffer[ends[first] - lengths[first] - start : ends[last - 1] - start] for first, last in runs],
                [parts[first] for first, _ in runs],
                [subjects[first:last] for first, last in runs],
            )
            begin = end

    def _free_slot(self, size: int) -> _Slot | None:
        """Return a chunk that can be filled, or None if the pool has no buffer free.

        Blocks only for the drive, never for the pool: other threads that hold buffers may be waiting for this one.
        """
        if len(self._slots) < _CHUNKS:
            slot = _Slot()
            self._slots.append(slot)  # before leasing, so that the lease is released even if this is interrupted
            slot.lease = self._pool.try_lease(size)
            if slot.lease is not None:
                return slot
            self._slots.remove(slot)
        if not self._slots:
            return None
        slot = self._slots[self._next % len(self._slots)]
        self._next += 1
        slot.sent.exception()
        return slot


def _joined(columns: _Columns) -> set[int]:
    """Return the indices of tensors whose bytes follow those of the tensor before, both in the file and in memory."""
    parts, tensors, _, addresses, sizes = columns
    following = list(map(operator.add, addresses, sizes))
    candidates = [index for index in range(1, len(parts)) if addresses[index] == following[index - 1]]
    return {
        index
        for index in candidates
        if addresses[index - 1] != 0
        and (parts[index].file, parts[index].offset) == (parts[index - 1].file, parts[index - 1].offset + sizes[index - 1])
        and tensors[index].untyped_storage().data_ptr() == tensors[index - 1].untyped_storage().data_ptr()
    }


def _span(first: torch.Tensor, nbytes: int) -> torch.Tensor:
    """Return ``nbytes`` bytes of memory from the beginning of a tensor on, as one tensor."""
    import torch

    storage = first.untyped_storage()
    start = first.data_ptr() - storage.data_ptr()
    return torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)[start : start + nbytes]


def _fill(base: int, addresses: list[int], sizes: list[int], lengths: list[int]) -> None:
    """Copy tensors side by side to the address ``base``, each followed by zeros up to its padded length.

    The zeros keep old contents of the buffer from being written to the file.
    """
    begins = list(itertools.accumulate(lengths[:-1], initial=base))
    destinations = begins + list(map(operator.add, begins, sizes))
    rests = list(map(operator.sub, lengths, sizes))
    copy_many(array("Q", destinations), array("Q", addresses + [_ZEROS] * len(rests)), array("Q", sizes + rests))


class Transfers:
    """Several futures as one, for releasing a lease after all of them."""

    def __init__(self, futures: Sequence[Future]) -> None:
        self._futures = futures

    def done(self) -> bool:
        """Return whether all have ended. Never blocks."""
        return all(future.done() for future in self._futures)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait until all have ended. Return the first error, or None."""
        errors = [future.exception(timeout) for future in self._futures]
        return next((error for error in errors if error is not None), None)


class _Slot:
    """A leased chunk of memory, and the transfers that write from it."""

    def __init__(self) -> None:
        self.lease: Lease | None = None
        self.sent = Transfers([])
