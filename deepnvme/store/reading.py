"""Reads many tensors from a store's files in few requests: adjacent tensors are read together into one buffer."""

from __future__ import annotations

import errno
from collections.abc import Sequence

import torch

from deepnvme.engine import Engine, File
from deepnvme.memory.alignment import ALIGNMENT, padded
from deepnvme.memory.host import empty_aligned
from deepnvme.memory.tensor_bytes import contiguous_strides
from deepnvme.telemetry.descriptions import shorten
from deepnvme.transfer.scatter import runs

from .allocator import split_tensor
from .catalog import CatalogEntry, CorruptTensor, TensorVersion
from .futures import Operation

_RUN = 16 << 20
"""Largest buffer, in bytes, that several tensors are read into. The buffer is freed with the last of its tensors."""


def read_into(
    engine: Engine, files: Sequence[File], operation: Operation, entry: CatalogEntry, version: TensorVersion, target: torch.Tensor
) -> None:
    """Start reading a tensor into ``target``, and add the transfers to the operation.

    Args:
        engine: Reads the files.
        files: The store's files.
        operation: The get.
        entry: The tensor's entry, for errors.
        version: The tensor to read.
        target: Contiguous tensor with the same number of bytes.
    """
    for part, piece in split_tensor(version.parts, target):
        _submit(operation, engine, piece, files[part.file], part.offset, (entry,))


def read_new(
    engine: Engine,
    files: Sequence[File],
    operation: Operation,
    entries: Sequence[CatalogEntry],
    versions: Sequence[TensorVersion],
) -> list[torch.Tensor]:
    """Start reading tensors into new memory, and add the transfers to the operation.

    Args:
        engine: Reads the files.
        files: The store's files.
        operation: The get.
        entries: The tensors' entries, for errors.
        versions: The tensors to read.

    Returns:
        The tensors, in the same order, on the CPU. Their contents are undefined until the operation has ended.
    """
    tensors: dict[int, torch.Tensor] = {}
    whole = []
    for index, version in enumerate(versions):
        if len(version.parts) == 1:
            whole.append(index)
            continue
        buffer = SharedBuffer(sum(padded(part.nbytes) for part in version.parts))
        tensors[index] = buffer.tensor(0, version.info.dtype, version.info.shape)
        read_into(engine, files, operation, entries[index], version, tensors[index])
    under_way = []
    for run in runs([versions[index].parts[0] for index in whole], _RUN, ALIGNMENT):
        members = [whole[index] for index in run.members]
        buffer = SharedBuffer(run.end - run.begin)
        subjects = [entries[index] for index in members]
        _submit(operation, engine, buffer.memory, files[versions[members[0]].parts[0].file], run.begin, subjects)
        under_way.append((buffer, run.begin, members))
    for buffer, start, members in under_way:  # now that all reads are started, so that the drive is busy meanwhile
        for index in members:
            version = versions[index]
            tensors[index] = buffer.tensor(version.parts[0].offset - start, version.info.dtype, version.info.shape)
    return [tensors[index] for index in range(len(versions))]


def _submit(
    operation: Operation, engine: Engine, memory: torch.Tensor, file: File, offset: int, entries: Sequence[CatalogEntry]
) -> None:
    """Start one read that serves these entries. Raises CorruptTensor if the file is too short, which means it was truncated."""
    try:
        operation.submit(engine.read, [memory], [file], [offset], subjects=[entries])
    except ValueError as error:
        if offset + memory.nbytes <= file.size():
            raise
        text = f"{shorten([entry.name for entry in entries])}: {error}; put it again"
        raise CorruptTensor(errno.EBADMSG, text, file.path) from error


class SharedBuffer:
    """A new buffer that several tensors are read into. It is freed with the last of its tensors.

    Args:
        nbytes: Bytes; a multiple of ALIGNMENT.
    """

    def __init__(self, nbytes: int) -> None:
        self.memory = empty_aligned(nbytes)
        self._seen: dict[torch.dtype, tuple[torch.Tensor, int]] = {}

    def tensor(self, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """Return a contiguous tensor in the buffer.

        Args:
            offset: Where the tensor begins: bytes from the start of the buffer, a multiple of ALIGNMENT.
            dtype: Dtype of the tensor.
            shape: Shape of the tensor.
        """
        seen = self._seen.get(dtype)
        if seen is None:
            view = self.memory.view(dtype)
            seen = self._seen[dtype] = view, int(view.storage_offset())
        base, start = seen
        return base.as_strided(shape, contiguous_strides(shape), start + offset // dtype.itemsize)
