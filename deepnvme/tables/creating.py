"""Creates the files of a new table.

1. The directories are locked, and checked to have no table: no manifest, and no file of rows.
2. ``rows.new`` in each directory is preallocated, filled in order, given the table's identity, and flushed.
3. The manifest is written under a temporary name. It says that files of rows with its identity belong to no table yet.
4. Each ``rows.new`` is renamed to ``rows``, and then the manifest to its final name. This last rename creates the table.

If the process is killed before the last rename, the next creation in these directories removes the files left behind.
"""

from __future__ import annotations

import contextlib
import errno
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from deepnvme.drives.aio_config import AioConfig
from deepnvme.drives.profiles import engine_for
from deepnvme.engine import Engine, File
from deepnvme.files.directory_lock import DirectoryLock, DirectoryOwner
from deepnvme.files.preallocation import preallocate
from deepnvme.files.replacing import sync_directory, with_filename
from deepnvme.memory.alignment import padded
from deepnvme.ops import load_async_io
from deepnvme.transfer.gather import Transfers

from .identity import file_bytes, is_file_of, write_identity
from .layout import Column, TableLayout
from .manifest import MANIFEST_NAME, ROWS_NAME, UNFINISHED_NAME, Epochs, load_manifest, save_manifest

_FILL_BYTES = 8 << 20
"""Bytes of rows that are written at a time."""
_NORMAL_PART_BYTES = 4 << 20
"""Bytes of rows that :class:`NormalRows` makes at a time."""
_CHUNK_BYTES = 64 << 10
"""Bytes of consecutive rows in the file of one drive before the rows continue on the next drive."""
_SECTOR = 512
_UNFINISHED_ROWS = "rows.new"
"""Name of a file of rows until all rows are written."""
_FIRST_EPOCH = 1

Values = Callable[[int, int], torch.Tensor]
"""A function that returns rows ``begin`` to ``end`` as a tensor of shape ``(end - begin, *row_shape)``."""


def create_files(
    directories: list[Path],
    rows: int,
    columns: tuple[Column, ...],
    values: Values | None,
    initial: Mapping[str, float],
    updatable: bool,
    config: AioConfig | None,
) -> None:
    """Create the files of a table. Blocks until they are on stable storage.

    Args:
        directories: The table's directories.
        rows: Number of rows.
        columns: Columns of each row.
        values: Returns a range of rows; None for zeros.
        initial: Initial value of the optimizer states, by column name.
        updatable: Whether rows can be changed later: each row then has two versions on the drive.
        config: Settings of the engine; None for the profile of the drive.

    Raises:
        FileExistsError: If one of the directories has a table already.
        ValueError: If ``values`` returns another shape or dtype.
        OSError: From the drive. All files of the new table are removed then.
    """
    _check_empty(directories)
    with contextlib.ExitStack() as stack:
        owner = DirectoryOwner("Table", "wait until it is made")
        for directory in directories:
            stack.callback(DirectoryLock(directory, owner).release)
        _check_empty(directories)  # somebody else may have made one just now
        for path in _orphaned_files(directories):
            path.unlink()
        stack.callback(_remove_unless_made, directories)
        engine = stack.enter_context(engine_for(directories, config))
        paths = [directory / ROWS_NAME for directory in directories]
        unfinished = [directory / _UNFINISHED_ROWS for directory in directories]
        for path in unfinished:
            path.unlink(missing_ok=True)
        # Other rows are in whole sectors only where they have two versions.
        files = [stack.enter_context(engine.open(path, "x+", whole_sectors=updatable)) for path in unfinished]
        sector = max(_SECTOR, *(file.sector_size for file in files))
        layout = _layout_of(paths, rows, columns, updatable, sector)
        for volume, path in enumerate(unfinished):
            with with_filename(path):
                descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
                try:
                    size = padded(file_bytes(layout, volume), sector)
                    preallocate(descriptor, 0, size, str(path), "give the table a directory on a larger drive")
                finally:
                    os.close(descriptor)
        filled = values is not None or any(initial.values())
        if filled:
            _fill(engine, files, layout, values, initial)
        identity = uuid.uuid4().hex
        Transfers(write_identity(engine, files, layout, identity)).result()
        Transfers(map(engine.fsync, files)).result()
        committed = _FIRST_EPOCH if updatable and filled else 0
        epochs = Epochs(committed=committed, reserved=committed, abandoned=(), attributes={}, identity=identity)
        save_manifest(directories, layout, epochs, UNFINISHED_NAME)
        for directory in directories:
            with with_filename(directory / _UNFINISHED_ROWS):
                os.rename(directory / _UNFINISHED_ROWS, directory / ROWS_NAME)
            sync_directory(directory)
            sync_directory(directory.parent)
        with with_filename(directories[0] / MANIFEST_NAME):
            os.rename(directories[0] / UNFINISHED_NAME, directories[0] / MANIFEST_NAME)
        sync_directory(directories[0])


def _check_empty(directories: Sequence[Path]) -> None:
    """Raise FileExistsError if a directory has a manifest, or a file of rows, of another table."""
    left_behind = _orphaned_files(directories)
    for path in [directory / name for directory in directories for name in (MANIFEST_NAME, ROWS_NAME)]:
        if os.path.lexists(path) and path not in left_behind:
            raise FileExistsError(errno.EEXIST, "there is a table already: open it, or remove the directory", str(path))


def _orphaned_files(directories: Sequence[Path]) -> list[Path]:
    """Return files of rows left by a killed creation: those with the identity in the temporary manifest."""
    try:
        _, epochs = load_manifest(directories[0], UNFINISHED_NAME)
    except OSError:
        return []
    paths = [directory / ROWS_NAME for directory in directories]
    return [path for volume, path in enumerate(paths) if is_file_of(path, volume, epochs)]


def _remove_unless_made(directories: Sequence[Path]) -> None:
    """Remove all files of the table if it has no manifest."""
    if not (directories[0] / MANIFEST_NAME).exists():
        paths = [directory / name for directory in directories for name in (_UNFINISHED_ROWS, ROWS_NAME)]
        for path in [*paths, directories[0] / UNFINISHED_NAME]:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)


def _layout_of(paths: list[Path], rows: int, columns: tuple[Column, ...], updatable: bool, sector: int) -> TableLayout:
    layout = TableLayout(tuple(paths), rows, columns)
    version = padded(layout.record_bytes + load_async_io().tables.VERSION_HEADER_BYTES, sector) if updatable else 0
    stride = 2 * version if updatable else layout.record_bytes
    chunk = max(_CHUNK_BYTES // stride, 1) if len(paths) > 1 else 1
    return TableLayout(tuple(paths), rows, columns, 0, version, chunk)


def _fill(
    engine: Engine, files: Sequence[File], layout: TableLayout, values: Values | None, initial: Mapping[str, float]
) -> None:
    """Write all rows in order, some MiB at a time: one part is made while the previous part is written."""
    turn = layout.chunk * len(files)  # rows after which the first file has its turn again
    step = max(_FILL_BYTES // layout.stride // turn, 1) * turn
    written = Transfers()
    for begin in range(0, layout.rows, step):
        end = min(begin + step, layout.rows)
        column = layout.values
        given = torch.zeros(end - begin, *column.shape, dtype=column.dtype) if values is None else values(begin, end)
        if tuple(given.shape) != (end - begin, *column.shape) or given.dtype != column.dtype:
            raise ValueError(
                f"values of rows {begin} to {end} must have the shape {(end - begin, *column.shape)} in {column.dtype},"
                f" got {tuple(given.shape)} in {given.dtype}"
            )
        images = _images(layout, given, initial)
        written.take_ended(most=2 * len(files) - 1)
        for volume, file in enumerate(files):
            own = _volume_part(layout, images, volume, len(files))
            if len(own):
                offset = layout.offset_of(begin + volume * layout.chunk)
                written.start(engine.write, own.reshape(-1), file, offset)
    written.result()


def _images(layout: TableLayout, values: torch.Tensor, initial: Mapping[str, float]) -> torch.Tensor:
    """Return records as they are on the drive, bytes of shape (rows, stride)."""
    images = torch.zeros(len(values), layout.stride, dtype=torch.uint8)
    header = load_async_io().tables.VERSION_HEADER_BYTES if layout.updatable else 0
    if header:
        images[:, :header].copy_(torch.tensor([_FIRST_EPOCH]).view(torch.uint8).expand(len(values), header))
    records = torch.zeros(len(values), layout.record_bytes, dtype=torch.uint8) if header else images
    for column in layout.columns:
        if column is layout.values:
            column.of(records).copy_(values.detach())
        else:
            column.of(records).fill_(initial[column.name])
    if header:
        images[:, header : header + layout.record_bytes] = records
    return images


def _volume_part(layout: TableLayout, images: torch.Tensor, volume: int, volumes: int) -> torch.Tensor:
    """Return the part of ``images`` that belongs in the file of one volume.

    The rows are striped: ``images`` must begin with a chunk of the first volume.
    """
    if volumes == 1:
        return images
    parts = torch.split(images, layout.chunk)
    return torch.cat([images[:0], *parts[volume::volumes]])


class NormalRows:
    """Generates the rows of a new embedding: normally distributed, with the same numbers as ``torch.nn.Embedding``.

    The numbers come from torch's default generator, part by part. ``normal_`` generates 16 numbers at a time, and the last 16
    of a tensor twice if its size is not a multiple of 16. So that parts give the same numbers as one large tensor, each
    part has a multiple of 16 rows, except the last, which has at least 16.

    Args:
        rows: Number of rows.
        embedding_dim: Elements of each row.
        dtype: Dtype of the elements.
        zero_row: Number of the row to be filled with zeros; None for no such row.
    """

    def __init__(self, rows: int, embedding_dim: int, dtype: torch.dtype, zero_row: int | None) -> None:
        self._rows, self._zero_row = rows, zero_row
        self._step = max(_NORMAL_PART_BYTES // max(embedding_dim * dtype.itemsize, 1) // 16 * 16, 16)
        self._made = torch.empty(0, embedding_dim, dtype=dtype)  # made, and not returned yet
        self._begin = 0  # number of the first row of _made

    def __call__(self, begin: int, end: int) -> torch.Tensor:
        """Return rows ``begin`` to ``end``. Calls must come in order, without gaps."""
        parts = [self._made]
        made = self._begin + len(self._made)
        while made < end:
            rest = self._rows - made
            count = rest if rest < 2 * self._step else self._step
            part = self._made.new_empty(count, self._made.shape[1]).normal_()
            if self._zero_row is not None and made <= self._zero_row < made + count:
                part[self._zero_row - made] = 0
            parts.append(part)
            made += count
        whole = torch.cat(parts)
        self._made, self._begin = whole[end - begin :].clone(), end
        return whole[: end - begin]
