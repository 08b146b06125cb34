"""Tensors larger than memory: mapped from files without a name, which are written some rows at a time."""

from __future__ import annotations

import contextlib
import errno
import math
import os
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
        directory: Directory of the files. If it cannot be written to, the system's temporary directory is used.
        rows: Number of rows of each tensor.
        columns: For each tensor its dtype, and the shape of one row.
        values: Returns rows ``begin`` to ``end`` of each tensor, on the CPU.

    Raises:
        OSError: From the drive; ENOSPC before anything is written.
    """
    row_bytes = [math.prod(shape) * dtype.itemsize for dtype, shape in columns]
    with contextlib.ExitStack() as stack:
        paths = [stack.enter_context(_unnamed_file(directory, rows * each)) for each in row_bytes]
        engine = stack.enter_context(engine_for([directory]))
        files = [stack.enter_context(engine.open(path, "r+", whole_sectors=True)) for path in paths]
        written = Transfers()
        for begin, end in parts_of(rows, sum(row_bytes)):
            written.take_ended(most=len(files))
            for part, file, size in zip(values(begin, end), files, row_bytes, strict=True):
                if size:
                    written.start(engine.write, part.contiguous(), file, begin * size)
        written.result()
        found = []
        for path, (dtype, shape) in zip(paths, columns, strict=True):
            numel = rows * math.prod(shape)
            mapped = torch.from_file(str(path), shared=False, size=numel, dtype=dtype) if numel else torch.empty(0, dtype=dtype)
            found.append(mapped.view(rows, *shape))
        return found


@contextlib.contextmanager
def _unnamed_file(directory: Path, size: int) -> Iterator[Path]:
    """Yield the path, under /proc, of a preallocated file without a name, so that a killed process leaves no file.

    The path is valid until the ``with`` block ends.
    """
    try:
        descriptor, held = _open_unnamed(directory), directory
    except OSError as error:
        if error.errno not in (errno.EROFS, errno.EACCES, errno.EPERM):
            raise
        held = Path(tempfile.gettempdir())  # the table is from a file that others own, or from a read-only mount
        descriptor = _open_unnamed(held)
    try:
        remedy = "a state dict takes as many bytes as the rows: make room"
        preallocate(descriptor, 0, padded(size, _SECTOR), str(held), remedy)
        yield Path(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)


def _open_unnamed(directory: Path) -> int:
    """Return the descriptor of a new file without a name."""
    with with_filename(directory):
        try:
            return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT):  # nfs, overlays, some FUSE
                raise
        descriptor, name = tempfile.mkstemp(prefix="tensor-", suffix=".tmp", dir=directory)
        try:
            os.unlink(name)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor
