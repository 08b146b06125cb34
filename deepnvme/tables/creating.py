"""Creates the files of a new table.

1. The directories are checked to have no table: neither a manifest nor a file of rows. They are locked.
2. ``rows`` in each directory is preallocated, filled in order, and flushed.
3. Memberships are written to all directories but the first, then the manifest to the first. This creates the table.

A process that is killed before leaves ``rows``, which the next creation refuses.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from deepnvme.drives.aio_config import AioConfig
from deepnvme.drives.profiles import engine_for
from deepnvme.engine import Engine, File
from deepnvme.files.directory_lock import DirectoryLock, DirectoryOwner
from deepnvme.files.identity import join
from deepnvme.files.preallocation import reserve
from deepnvme.files.replacing import sync_directory
from deepnvme.memory.alignment import padded
from deepnvme.ops import load_async_io
from deepnvme.transfer.gather import Transfers

from .layout import Column, Shard, TableLayout
from .manifest import MANIFEST_NAME, MEMBERSHIP_NAME, ROWS_NAME, Epochs, save_manifest

_FILL_BYTES = 8 << 20
"""Bytes of rows that are written at a time."""
_CHUNK_BYTES = 64 << 10
"""Bytes of consecutive rows in the file of one drive before the rows continue on the next drive."""
_SECTOR = 512
_FILE_MULTIPLE = 4096
_FIRST_EPOCH = 1

Values = Callable[[int, int], torch.Tensor]
"""A function that returns rows ``begin`` to ``end`` as a tensor of shape ``(end - begin, *row_shape)``."""


def create_files(
    directories: Sequence[Path], rows: int, columns: tuple[Column, ...], values: Values | None, initial: Mapping[str, float],
    updatable: bool, aio_config: AioConfig | None,
) -> None:  # fmt: skip
    """Create the files of a table. Blocks until they are on stable storage.

    Args:
        directories: The table's directories.
        rows: Number of rows.
        columns: Columns of each row.
        values: Returns a range of rows; None for zeros.
        initial: Initial value of the optimizer states, by column name.
        updatable: Whether rows can be changed later: each row then has two versions on the drive.
        aio_config: Settings of the engine; None for the profile of the drive.

    Raises:
        FileExistsError: If a directory has a table already, or rows left by a killed process.
        ValueError: If ``values`` returns another shape or dtype.
        OSError: If the drive cannot be read or written. All files of the new table are removed then.
    """
    for directory in directories:
        for path in (directory / MANIFEST_NAME, directory / ROWS_NAME):
            if os.path.lexists(path):
                text = "there is a table already, or what is left of one that was not made to the end: open it, or remove it"
                raise FileExistsError(errno.EEXIST, text, str(path))
    with contextlib.ExitStack() as stack:
        owner = DirectoryOwner("Table", "wait until it is made")
        for directory in directories:
            stack.callback(DirectoryLock(directory, owner).release)
        engine = stack.enter_context(engine_for(directories, aio_config))
        paths = [directory / ROWS_NAME for directory in directories]
        files = []
        for path in paths:  # other rows are in whole sectors only where they have two versions
            files.append(stack.enter_context(engine.open(path, "x+", whole_sectors=updatable)))
            stack.callback(_remove_unless_made, path, directories[0])
        sector = max(_SECTOR, *(file.sector_size for file in files))
        layout = _layout_of(paths, rows, columns, updatable, sector)
        for volume, path in enumerate(paths):
            reserve(path, file_bytes(layout, volume), "give the table a directory on a larger drive")
        filled = values is not None or any(initial.values())
        if filled:
            _fill(engine, files, layout, values, initial)
        Transfers(map(engine.fsync, files)).result()
        identity = uuid.uuid4().hex if len(directories) > 1 else ""
        join(directories, MEMBERSHIP_NAME, identity)
        for directory in directories:
            sync_directory(directory)
            sync_directory(directory.parent)
        committed = _FIRST_EPOCH if updatable and filled else 0
        save_manifest(layout, Epochs(committed=committed, reserved=committed, abandoned=(), attributes={}, identity=identity))


def file_bytes(layout: TableLayout, volume: int) -> int:
    """Return the size of one of a table's files of rows."""
    return padded(layout.bytes_in(volume), _FILE_MULTIPLE)


def _remove_unless_made(path: Path, first: Path) -> None:
    """Remove the rows of a table that has no manifest, and the membership beside them."""
    if not (first / MANIFEST_NAME).exists():
        for each in (path, path.with_name(MEMBERSHIP_NAME)):
            with contextlib.suppress(OSError):
                each.unlink()


def _layout_of(paths: list[Path], rows: int, columns: tuple[Column, ...], updatable: bool, sector: int) -> TableLayout:
    layout = TableLayout(tuple(map(Shard, paths)), rows, columns)
    if updatable:
        version = layout.record_bytes + load_async_io().tables.VERSION_HEADER_BYTES
        layout = replace(layout, version_bytes=padded(version, sector))
    return replace(layout, chunk=max(_CHUNK_BYTES // layout.stride, 1) if len(paths) > 1 else 0)


def _fill(
    engine: Engine, files: Sequence[File], layout: TableLayout, values: Values | None, initial: Mapping[str, float]
) -> None:
    """Write all rows in order, some MiB at a time. Each part is computed while the previous part is written."""
    # All parts but the last have a multiple of 16 rows, and the last has not less: normal_() makes 16 numbers at a time, and
    # the last 16 of a tensor twice unless its size is a multiple of 16.
    wanted = _FILL_BYTES // layout.stride
    turn = max(layout.chunk, 1) * len(files)  # rows after which the first file has its turn again
    multiple = turn if wanted < math.lcm(turn, 16) else math.lcm(turn, 16)
    step = max(wanted // multiple, 1) * multiple
    written = Transfers()
    column = layout.values
    begins = range(0, max(layout.rows - step + 1, min(layout.rows, 1)), step)
    for begin in begins:
        end = layout.rows if begin == begins[-1] else begin + step
        shape = (end - begin, *column.shape)
        given = torch.zeros(shape, dtype=column.dtype) if values is None else values(begin, end)
        if tuple(given.shape) != shape or given.dtype != column.dtype:
            raise ValueError(
                f"values of rows {begin} to {end} must have the shape {shape} in {column.dtype},"
                f" got {tuple(given.shape)} in {given.dtype}"
            )
        images = _images(layout, given, initial)
        written.take_ended(most=2 * len(files) - 1)
        for volume, file in enumerate(files):
            own = images
            if layout.chunk:
                own = torch.cat([images[:0], *torch.split(images, layout.chunk)[volume :: len(files)]])
            if len(own):
                written.start(engine.write, own.reshape(-1), file, begin // len(files) * layout.stride)
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


def normal_rows(embedding_dim: int, dtype: torch.dtype, zero_row: int | None) -> Values:
    """Return a function that makes the rows of a new embedding: normally distributed, the same as ``torch.nn.Embedding``'s.

    Args:
        embedding_dim: Elements of each row.
        dtype: Dtype of the elements.
        zero_row: Number of the row to be filled with zeros; None for no such row.
    """

    def values(begin: int, end: int) -> torch.Tensor:
        """Return rows ``begin`` to ``end``, the next ones of torch's default generator."""
        rows = torch.empty(end - begin, embedding_dim, dtype=dtype).normal_()
        if zero_row is not None and begin <= zero_row < end:
            rows[zero_row - begin] = 0
        return rows

    return values
