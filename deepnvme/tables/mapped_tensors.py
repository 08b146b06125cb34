"""Tensors larger than memory: mapped from files without a name, which are written some rows at a time."""

from __future__ import annotations

import contextlib
import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from deepnvme.drives.profiles import engine_for
from deepnvme.files.preallocation import preallocate
from deepnvme.files.replacing import with_filename
from deepnvme.memory.alignment import padded
from deepnvme.transfer.gather import Transfers

_PART_BYTES = 8 << 20
"""Bytes of rows that are in memory at a time."""
_SECTOR = 4096


def parts_of(rows: int, row_bytes: int) -> Iterator[tuple[int, int]]:
    """Return consecutive ranges of rows, some MiB each, that cover all rows."""
    step = max(_PART_BYTES // max(row_bytes, 1), 1)
    for begin in range(0, rows, step):
        yield begin, min(begin + step, rows)


def mapped_tensors(
    directory: Path, rows: int, columns: Sequence[tuple[torch.dtype, tuple[int, ...]]],
    values: Callable[[int, int], Sequence[torch.Tensor]],
) -> list[torch.Tensor]:  # fmt: skip
    """Write tensors to unnamed temporary files, and return them mapped from there. Blocks until the files are written.

    The space of a file is free again when its tensor is garbage-collected. Changes of a tensor are not written to its file.

    Args:
        directory: Directory of the files.
        rows: Number of rows of each tensor.
        columns: For each tensor its dtype, and the shape of one row.
        values: Returns rows ``begin`` to ``end`` of each tensor, on the CPU.

    Raises:
        OSError: If the drive cannot be read or written; ENOSPC before anything is written.
    """
    row_bytes = [math.prod(shape) * dtype.itemsize for dtype, shape in columns]
    with contextlib.ExitStack() as stack:
        paths = []
        for each in row_bytes:
            with with_filename(directory, instead=True):
                file = stack.enter_context(tempfile.TemporaryFile(dir=directory, prefix="tensor-"))
            remedy = "a state dict takes as many bytes as the rows: make room"
            preallocate(file.fileno(), 0, padded(rows * each, _SECTOR), str(directory), remedy)
            paths.append(f"/proc/self/fd/{file.fileno()}")
        engine = stack.enter_context(engine_for([directory]))
        files = [stack.enter_context(engine.open(path, "r+", whole_sectors=True)) for path in paths]
        written = Transfers()
        for begin, end in parts_of(rows, sum(row_bytes)):
            written.take_ended(most=len(files))
            for part, opened, size in zip(values(begin, end), files, row_bytes, strict=True):
                if size:
                    written.start(engine.write, part.contiguous(), opened, begin * size)
        written.result()
        found = []
        for path, (dtype, shape) in zip(paths, columns, strict=True):
            numel = rows * math.prod(shape)
            mapped = torch.from_file(path, shared=False, size=numel, dtype=dtype) if numel else torch.empty(0, dtype=dtype)
            found.append(mapped.view(rows, *shape))
        return found
