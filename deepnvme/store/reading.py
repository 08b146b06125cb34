"""Many tensors from a store's files in few requests: neighbours are read together, into memory that they share."""

from __future__ import annotations

import errno
import functools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from deepnvme._listed import listed
from deepnvme.engine import Engine, File, without_python
from deepnvme.memory.alignment import padded
from deepnvme.memory.host import empty_aligned

from .allocator import TensorPart, pieces
from .catalog import CatalogEntry, CorruptTensor, TensorVersion
from .futures import Operation

if TYPE_CHECKING:
    import torch

_RUN = 16 << 20
"""Bytes of a buffer that tensors are read into together, and that lives for as long as one of them."""


def read_into(
    engine: Engine, files: Sequence[File], operation: Operation, entry: CatalogEntry, version: TensorVersion, target: torch.Tensor
) -> None:
    """Start reading a tensor over ``target``, contiguous and of its size, and add the transfers to the operation."""
    for part, piece in pieces(version.parts, target):
        _submit(operation, engine, piece, files[part.file], part.offset, (entry,))


def read_new(
    engine: Engine,
    files: Sequence[File],
    operation: Operation,
    entries: Sequence[CatalogEntry],
    versions: Sequence[TensorVersion],
) -> list[torch.Tensor]:
    """Start reading tensors into new memory, and add the transfers to the operation; return the tensors."""
    tensors: dict[int, torch.Tensor] = {}
    whole = []
    for index, version in enumerate(versions):
        if len(version.parts) == 1:
            whole.append(index)
            continue
        buffer = SharedBuffer(sum(padded(part.nbytes) for part in version.parts))
        tensors[index] = buffer.tensor(0, version.info.dtype, version.info.shape)
        read_into(engine, files, operation, entries[index], version, tensors[index])
    runs = []
    for run in neighbours([versions[index].parts[0] for index in whole]):
        members = [whole[index] for index in run]
        first, last = versions[members[0]].parts[0], versions[members[-1]].parts[0]
        buffer = SharedBuffer(last.offset + padded(last.nbytes) - first.offset)
        subjects = [entries[index] for index in members]
        _submit(operation, engine, buffer.memory, files[first.file], first.offset, subjects)
        runs.append((buffer, first.offset, members))
    for buffer, start, members in runs:  # while the drive is busy
        for index in members:
            version = versions[index]
            tensors[index] = buffer.tensor(version.parts[0].offset - start, version.info.dtype, version.info.shape)
    return [tensors[index] for index in range(len(versions))]


def _submit(
    operation: Operation, engine: Engine, memory: torch.Tensor, file: File, offset: int, entries: Sequence[CatalogEntry]
) -> None:
    """Start one read, of these entries. Raises CorruptTensor where the file ends before: somebody has cut it off."""
    try:
        operation.submit(without_python(engine.read), [memory], [file], [offset], subjects=[entries])
    except ValueError as error:
        if offset + memory.nbytes <= file.size():
            raise
        text = f"{listed([entry.name for entry in entries])}: {error}; put it again"
        raise CorruptTensor(errno.EBADMSG, text, file.path) from error


def neighbours(parts: Sequence[TensorPart], limit: int = _RUN) -> Iterator[list[int]]:
    """Indices of the parts by their place in the files, in runs without gaps of at most ``limit`` bytes, or of one part."""
    run: list[int] = []
    start = end = 0
    before = -1
    for index in sorted(range(len(parts)), key=parts.__getitem__):
        file, offset, nbytes = parts[index]
        length = padded(nbytes)
        if offset != end or file != before or end + length - start > limit:
            if run:
                yield run
            run = []
            before, start, end = file, offset, offset
        run.append(index)
        end += length
    if run:
        yield run


class SharedBuffer:
    """New memory that several tensors are read into; it lives for as long as one of them."""

    def __init__(self, nbytes: int) -> None:
        self.memory = empty_aligned(nbytes)
        self._seen: dict[torch.dtype, tuple[torch.Tensor, int]] = {}

    def tensor(self, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """The tensor ``offset`` bytes into it, a multiple of ALIGNMENT."""
        seen = self._seen.get(dtype)
        if seen is None:
            view = self.memory.view(dtype)
            seen = self._seen[dtype] = view, int(view.storage_offset())
        base, start = seen
        return base.as_strided(shape, _strides(shape), start + offset // dtype.itemsize)


@functools.lru_cache(maxsize=1024)
def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of a contiguous tensor."""
    strides = []
    stride = 1
    for size in reversed(shape):
        strides.append(stride)
        stride *= max(size, 1)
    return tuple(reversed(strides))
