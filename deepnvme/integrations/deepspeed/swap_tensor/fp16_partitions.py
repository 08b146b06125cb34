"""Read low-precision partitions of parameters, some of them from files, into one flat tensor."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from deepnvme.engine import Engine, Future, without_python

PartitionInfo = tuple[torch.Tensor, int, str | None]
"""A partition: (tensor, number of elements, path). The values are in the file at the path, or in the tensor if that is None.

With a path, the tensor is DeepSpeed's placeholder, whose dtype may be another than that of the values in the file.
"""


def read_partitions(
    engine: Engine, partitions: Sequence[PartitionInfo], buffers: Sequence[torch.Tensor], target: torch.Tensor
) -> None:
    """Fill a flat tensor with partitions, one after the other, converted to its dtype. Blocks.

    A file is read into the end of the memory that its values will have, since they take no more bytes there.

    Args:
        engine: Reads the files.
        partitions: Partitions in order.
        buffers: Tensors of the files' dtype; nothing else of them is used. If there are none, each partition's tensor has it.
        target: One dimension, and a dtype of at least the size of the partitions'.

    Raises:
        ValueError: If ``target`` does not have as many elements as all partitions.
        OSError: From reading. The content of ``target`` is undefined then.
    """
    numels = [numel for _, numel, _ in partitions]
    if sum(numels) != target.numel():
        raise ValueError(f"the partitions have {sum(numels)} elements in all, the parameter {target.numel()}")
    paths, places = [], []
    for (tensor, numel, path), part in zip(partitions, torch.split(target, numels), strict=True):
        if path is None:
            part.copy_(tensor.detach().reshape(-1))
        else:
            paths.append(path)
            places.append((part.view((buffers[0] if buffers else tensor).dtype)[-numel:], part))
    reading: deque[Future] = deque()
    try:
        # One call in C, so that Ctrl-C cannot come between starting a read and noting it.
        reading.extend(map(without_python(engine.read), [values for values, _ in places], paths))
        for values, part in places:
            reading[0].result()
            part.copy_(values.clone())  # a copy, because the two overlap
            reading.popleft()
    finally:
        for future in reading:  # after an error: wait, because the caller may reuse the memory
            future.exception()
