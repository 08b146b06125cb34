"""Writing many tensors to a store's files in few requests: neighbours together, small tensors through leased buffers."""

from __future__ import annotations

import ctypes
import itertools
import operator
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from deepnvme.engine import Engine, File, Future
from deepnvme.memory.alignment import ALIGNMENT
from deepnvme.memory.pool import BufferPool
from deepnvme.memory.tensor_bytes import copy_many, flat_bytes
from deepnvme.transfer.gather import CHUNK, DIRECT_FROM, ChunkRing
from deepnvme.transfer.scatter import runs

from .allocator import Parts, TensorPart, split_tensor
from .futures import Operation

_zero_page = ctypes.create_string_buffer(ALIGNMENT)
_ZEROS = ctypes.addressof(_zero_page)
_BATCH = 1024
"""Number of tensors that are prepared at a time, so that the drive can write a batch while the next batch is prepared."""


class TensorColumns(NamedTuple):
    """Tensors that each lie in one extent, in the order of the files, with one list for each property of the tensors."""

    parts: list[TensorPart]
    tensors: list[torch.Tensor]
    subjects: list[Any]
    """Subject of each tensor, such as its catalog entry. The failures of the operation name it."""
    addresses: list[int]
    """Addresses on the host; 0 for tensors on devices."""
    sizes: list[int]
    """Bytes of each tensor."""

    def of(self, indices: Sequence[int]) -> TensorColumns:
        """Return the columns of the tensors with these indices."""
        columns: list[list[Any]] = [[column[index] for index in indices] for column in self]
        return TensorColumns(*columns)


class Writing:
    """Writes tensors to a store's files.

    Ten thousand tensors have to be prepared in less time than the drive takes to write them. So most loops go through one
    property of all tensors, not through all properties of one tensor.

    Args:
        engine: Writes the files.
        pool: Leases buffers for small tensors.
        files: The store's files.
        operation: The put, to which the transfers are added.
    """

    def __init__(self, engine: Engine, pool: BufferPool, files: Sequence[File], operation: Operation) -> None:
        self._start_write = engine.write
        self._pool = pool
        self._files = files
        self._operation = operation

    def start(
        self, places: Sequence[Parts], tensors: Sequence[torch.Tensor], addresses: Sequence[int], subjects: Sequence[Any]
    ) -> None:
        """Start writing tensors to their parts, and add the transfers to the operation.

        Tensors that are adjacent both in the file and in memory are written in one request. Other small tensors are copied
        into leased buffers, in the order of the file; if the pool has no buffer free, each is written by a request of its
        own. Blocks while all four buffers are being written.

        Args:
            places: The parts of each tensor.
            tensors: Contiguous tensors.
            addresses: Address of each tensor on the host, 0 for tensors on devices.
            subjects: The subject of each tensor, such as its catalog entry, for the operation's failures.
        """
        whole = [index for index, parts in enumerate(places) if len(parts) == 1]
        if len(whole) < len(places):
            for parts, tensor, subject in zip(places, tensors, subjects, strict=True):
                for part, piece in split_tensor(parts, tensor) if len(parts) > 1 else ():
                    self._write([piece], [part], [(subject,)])
        whole.sort(key=places.__getitem__)
        ring: ChunkRing | None = None
        try:
            for first in range(0, len(whole), _BATCH):
                batch = whole[first : first + _BATCH]
                extents = [places[index][0] for index in batch]
                columns = TensorColumns(
                    extents,
                    [tensors[index] for index in batch],
                    [subjects[index] for index in batch],
                    [addresses[index] for index in batch],
                    [nbytes for _, _, nbytes in extents],
                )
                small = self._write_large(columns)
                lengths = [-(-nbytes // ALIGNMENT) * ALIGNMENT for nbytes in small.sizes]  # padded(), without a call for each
                if ring is None:
                    # It does not wait for the pool: other threads that hold buffers may be waiting for this one.
                    ring = ChunkRing(self._pool, min(CHUNK, sum(lengths)) if len(whole) <= _BATCH else CHUNK, wait=False)
                self._gather(small, lengths, ring)
        finally:
            if ring is not None:
                ring.release()

    def _write(
        self, tensors: Sequence[torch.Tensor], parts: Sequence[TensorPart], subjects: Iterable[Sequence[Any]]
    ) -> list[Future]:
        """Start writing tensors, each to one part. Return the transfers."""
        files = [self._files[part.file] for part in parts]
        offsets = [part.offset for part in parts]
        return self._operation.submit(self._start_write, tensors, files, offsets, subjects=subjects)

    def _write_large(self, columns: TensorColumns) -> TensorColumns:
        """Start writing large tensors, and adjacent ones that are large together. Return the small ones that are left."""
        parts, tensors, subjects, addresses, sizes = columns
        joined = _joined(columns)
        if not joined and max(sizes, default=0) < DIRECT_FROM and 0 not in addresses:
            return columns
        small: list[int] = []
        bounds = [index for index in range(len(parts) + 1) if index not in joined]
        for begin, end in itertools.pairwise(bounds):
            nbytes = sum(sizes[begin:end])
            if nbytes >= DIRECT_FROM or addresses[begin] == 0:
                tensor = tensors[begin] if end == begin + 1 else _span(tensors[begin], nbytes)
                self._write([tensor], [parts[begin]], [subjects[begin:end]])
            else:
                small.extend(range(begin, end))
        return columns.of(small)

    def _gather(self, columns: TensorColumns, lengths: list[int], ring: ChunkRing) -> None:
        """Copy small tensors into the chunks of the ring, and write the neighbours in each chunk together.

        Args:
            columns: The tensors.
            lengths: Bytes of their extents.
            ring: Leases the chunks.
        """
        parts, tensors, subjects, addresses, sizes = columns
        ends = list(itertools.accumulate(lengths))
        begin = 0
        while begin < len(parts):
            buffer = ring.memory(0, ring.nbytes) if len(parts) > 1 else None
            if buffer is None:
                self._write(tensors[begin:], parts[begin:], zip(subjects[begin:], strict=True))
                return
            start = ends[begin] - lengths[begin]
            end = bisect_right(ends, start + ring.nbytes, begin)
            _fill(buffer.data_ptr(), addresses[begin:end], sizes[begin:end], lengths[begin:end])
            together = list(runs(parts[begin:end], ring.nbytes, ALIGNMENT))
            firsts = [begin + run.members[0] for run in together]
            ring.sent(
                self._write(
                    buffer[: ends[end - 1] - start].split_with_sizes([run.end - run.begin for run in together]),
                    [parts[first] for first in firsts],
                    [subjects[first:last] for first, last in itertools.pairwise((*firsts, end))],
                )
            )
            begin = end


def _joined(columns: TensorColumns) -> set[int]:
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
    storage = first.untyped_storage()
    start = first.data_ptr() - storage.data_ptr()
    return flat_bytes(storage)[start : start + nbytes]


def _fill(base: int, addresses: list[int], sizes: list[int], lengths: list[int]) -> None:
    """Copy tensors side by side to the address ``base``, each followed by zeros up to its padded length.

    The zeros keep old contents of the buffer from being written to the file.
    """
    begins = list(itertools.accumulate(lengths[:-1], initial=base))
    destinations = begins + list(map(operator.add, begins, sizes))
    rests = list(map(operator.sub, lengths, sizes))
    copy_many(array("Q", destinations), array("Q", addresses + [_ZEROS] * len(rests)), array("Q", sizes + rests))
