"""Read low-precision partitions of parameters, some of them from files, into one flat tensor."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from deepnvme.engine import Future

from .tile_cache import TransferEngine

PartitionInfo = tuple[torch.Tensor, int, str | None]
"""A partition: (tensor, number of elements, path). The values are in the file at the path, or in the tensor if that is None."""
_Reading = tuple[Future, torch.Tensor, torch.Tensor]


def read_partitions(
    engine: TransferEngine, partitions: Sequence[PartitionInfo], buffers: Sequence[torch.Tensor], target: torch.Tensor
) -> None:
    """Fill a flat tensor with partitions, one after the other, converted to its dtype. Blocks.

    Args:
        engine: Reads the files.
        partitions: Partitions in order.
        buffers: One-dimensional tensors of the files' dtype to read into. A partition that fits into none of them is read into
            new memory.
        target: One dimension, any dtype.

    Raises:
        ValueError: If ``target`` does not have as many elements as all partitions.
        OSError: From reading. The content of ``target`` is undefined then.
    """
    numels = [numel for _, numel, _ in partitions]
    if sum(numels) != target.numel():
        raise ValueError(f"the partitions have {sum(numels)} elements in all, the parameter {target.numel()}")
    free = list(buffers)
    reading: deque[_Reading] = deque()
    start = 0
    try:
        for tensor, numel, path in partitions:
            part = target[start : start + numel]
            start += numel
            if path is None:
                part.copy_(tensor.detach().reshape(-1))
                continue
            if reading and not any(buffer.numel() >= numel for buffer in free):
                _convert(reading)
                free = list(buffers)
            fits = next((index for index, buffer in enumerate(free) if buffer.numel() >= numel), None)
            if fits is None:
                staging = torch.empty(numel, dtype=tensor.dtype, device="cpu")
            else:
                staging, free[fits] = free[fits][:numel], free[fits][numel:]
            reading.append((engine.read(staging, path), staging, part))
        _convert(reading)
    finally:
        for future, _, _ in reading:  # after an error: wait, because the caller may reuse the buffers
            future.exception()


def _convert(reading: deque[_Reading]) -> None:
    """Wait for all reads, and copy what was read to the target."""
    while reading:
        future, staging, part = reading[0]
        future.result()
        part.copy_(staging)
        reading.popleft()
