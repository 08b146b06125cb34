"""Transfers of tensors: large parts one by one, all small ones in one call of the engine."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence

import torch

from deepnvme.engine import File, Future
from deepnvme.transfer.gather import DIRECT_FROM

from .allocator import Parts, TensorPart, split_tensor
from .catalog import CatalogEntry, CorruptTensor
from .futures import Operation


def start_transfers(
    one: Callable[..., Future], many: Callable[..., Future], files: Sequence[File], operation: Operation,
    places: Sequence[Parts], tensors: Sequence[torch.Tensor], entries: Sequence[CatalogEntry],
) -> None:  # fmt: skip
    """Start reading or writing contiguous tensors, and add the transfers to the operation.

    Args:
        one: ``read`` or ``write`` of the engine.
        many: ``read_many`` or ``write_many``.
        files: The store's files.
        operation: The get or put.
        places: The parts of each tensor.
        tensors: The tensors.
        entries: The tensors' entries, for errors.

    Raises:
        CorruptTensor: If a file is too short, which means that it was truncated.
    """
    small: list[tuple[TensorPart, torch.Tensor, CatalogEntry]] = []
    try:
        for parts, tensor, entry in zip(places, tensors, entries, strict=True):
            for part, piece in split_tensor(parts, tensor):
                if part.nbytes >= DIRECT_FROM or len(places) == 1:
                    operation.submit(one, piece, files[part.file], part.offset, subjects=[entry])
                else:
                    small.append((part, piece, entry))
        if small:
            small.sort(key=lambda each: each[0])
            where, pieces, subjects = zip(*small, strict=True)
            operation.submit(
                many, pieces, [files[part.file] for part in where], [part.offset for part in where], subjects=subjects
            )
    except ValueError as error:
        for entry, parts in zip(entries, places, strict=True):
            for part in parts:
                if part.offset + part.nbytes > files[part.file].size():
                    text = f"{entry.name}: {error}; put it again"
                    raise CorruptTensor(errno.EBADMSG, text, files[part.file].path) from error
        raise
