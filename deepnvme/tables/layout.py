"""The layout of a table: where each row is in the table's files, and which columns a row has."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from deepnvme.memory.alignment import padded

_MOST_BYTES = 1 << 40
"""Limit of a record: offsets in a table then fit into 64 bits."""
VALUES = "values"
"""Name of the column that has the rows' values; the others are optimizer states."""


class Column(NamedTuple):
    """A part of each record: the row's values or one of its optimizer states; in a replay buffer, a tensor of the transition."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    """Shape that one record has in this column."""
    offset: int
    """Bytes from the start of the record."""

    @property
    def nbytes(self) -> int:
        """Bytes of one record in this column."""
        return math.prod(self.shape) * self.dtype.itemsize

    def of(self, records: torch.Tensor) -> torch.Tensor:
        """Return this column of all records, as a view of shape (records, *shape).

        ``records``: contiguous uint8 of shape (records, bytes of a record).
        """
        part = records[:, self.offset : self.offset + self.nbytes]
        return part.view(self.dtype).view(len(records), *self.shape)


class State(NamedTuple):
    """Dtype, shape and initial value that one optimizer state has in each row."""

    dtype: torch.dtype
    shape: Sequence[int]
    initial: float = 0.0
    """Initial value of all elements."""


def columns_of(dtype: torch.dtype, shape: Sequence[int], states: Mapping[str, State] | None = None) -> tuple[Column, ...]:
    """Return the columns of a record: the values, and states after them.

    Raises:
        ValueError: If a row would have no bytes, or more than a TiB; a size is negative, or a dtype quantised; or a state has the
            name of the values.
    """
    if VALUES in (states or {}):
        raise ValueError(f"a state must not have the name {VALUES!r}, which the rows themselves have")
    columns: list[Column] = []
    end = 0
    for name, state in {VALUES: State(dtype, shape), **(states or {})}.items():
        if str(state.dtype).startswith("torch.q"):
            raise ValueError(f"{name} must have a dtype that is not quantized, got {state.dtype}: store what int_repr() returns")
        if any(size < 0 for size in state.shape):
            raise ValueError(f"the shape of {name} must not have negative sizes, got {tuple(state.shape)}")
        column = Column(name, state.dtype, tuple(state.shape), padded(end, state.dtype.itemsize))
        end = column.offset + column.nbytes
        if end > _MOST_BYTES:
            raise ValueError(f"a row and its states may have {_MOST_BYTES} bytes, got {end} with {name} of shape {column.shape}")
        columns.append(column)
    if not columns[0].nbytes:
        raise ValueError(f"a row must have at least one byte, got shape {tuple(shape)} in {dtype}")
    return tuple(columns)


class Shard(NamedTuple):
    """Consecutive rows of a table in one file."""

    path: Path
    first_row: int = 0
    base: int = 0
    """Bytes from the start of the file to the first record of the shard."""


@dataclass(frozen=True)
class TableLayout:
    """Where the rows of a table are in its files. The arithmetic is that of ``csrc/tables/geometry.h``."""

    shards: tuple[Shard, ...]
    """The parts of the table, in the order of their rows. A file may have several."""
    rows: int
    columns: tuple[Column, ...]
    version_bytes: int = 0
    """Bytes of one of the two versions of a record, with header and padding; 0 if records have one version."""
    chunk: int = 0
    """Number of consecutive rows in one file before the rows continue in the next file; 0 if each file has consecutive rows."""

    @property
    def files(self) -> tuple[Path, ...]:
        """The files of the rows, each once: a file's number in here is that of its volume."""
        return tuple(dict.fromkeys(shard.path for shard in self.shards))

    @property
    def volumes(self) -> list[int]:
        """The number of each shard's file."""
        numbers = {path: number for number, path in enumerate(self.files)}
        return [numbers[shard.path] for shard in self.shards]

    @property
    def values(self) -> Column:
        """The column with the rows' values: the first."""
        return self.columns[0]

    @property
    def record_bytes(self) -> int:
        """Bytes of a row and its states: a multiple of each column's itemsize, so that columns are aligned in memory."""
        last = self.columns[-1]
        return padded(last.offset + last.nbytes, max(column.dtype.itemsize for column in self.columns))

    @property
    def stride(self) -> int:
        """Bytes from one record to the next, in a file."""
        return 2 * self.version_bytes if self.updatable else self.record_bytes

    @property
    def updatable(self) -> bool:
        """Whether rows can be changed: each has two versions."""
        return self.version_bytes > 0

    def rows_in(self, volume: int) -> int:
        """Return the number of rows in a file."""
        if self.chunk:
            whole, rest = divmod(self.rows, self.chunk * len(self.shards))
            return whole * self.chunk + min(max(rest - volume * self.chunk, 0), self.chunk)
        return sum(rows for _, rows in self._shards_in(volume))

    def bytes_in(self, volume: int) -> int:
        """Return the bytes that a file needs for its rows."""
        if self.chunk:
            return self.shards[volume].base + self.rows_in(volume) * self.stride
        return max(shard.base + rows * self.stride for shard, rows in self._shards_in(volume))

    def _shards_in(self, volume: int) -> Iterator[tuple[Shard, int]]:
        """Yield the shards of a file, each with its number of rows."""
        ends = [*(shard.first_row for shard in self.shards[1:]), self.rows]
        for shard, end in zip(self.shards, ends, strict=True):
            if shard.path == self.files[volume]:
                yield shard, end - shard.first_row
