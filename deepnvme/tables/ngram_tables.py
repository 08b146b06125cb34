"""Tables of n-gram embeddings, read from the safetensors files of a model where they are."""

from __future__ import annotations

import bisect
import os
import re
from collections.abc import Sequence
from pathlib import Path

import torch

from deepnvme.checkpoint.weight_locations import Location, weights_in
from deepnvme.config import AioConfig
from deepnvme.memory.byte_count import byte_count

from .table import DEFAULT_MEMORY_BUDGET, AnyPath, Table

SHARD_NAME = r"(?P<table>.+?)[._-](?:shard|part)[._-]?(?P<number>\d+)(?P<rest>\.\w+)?"
"""What the name of a tensor looks like that has some rows of a table: "ngram.shard_3.weight" is the fourth of "ngram.weight"."""


class RowShards:
    """Tables that are read as one: the rows of the first, then those of the second, and so on.

    Args:
        tables: All have rows of the same shape and dtype.

    Raises:
        ValueError: If they have not, or there is none.
    """

    def __init__(self, tables: Sequence[Table]) -> None:
        if not tables:
            raise ValueError("there must be at least one table")
        self.tables = tuple(tables)
        first = tables[0]
        for table in tables[1:]:
            if (table.row_shape, table.dtype) != (first.row_shape, first.dtype):
                raise ValueError(f"all tables must have rows of the same shape and dtype: {first} and {table} have not")
        self._ends = [sum(table.rows for table in tables[: number + 1]) for number in range(len(tables))]

    @property
    def rows(self) -> int:
        """Number of rows of all."""
        return self._ends[-1]

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Shape of one row."""
        return self.tables[0].row_shape

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of all rows together."""
        return (self.rows, *self.row_shape)

    @property
    def dtype(self) -> torch.dtype:
        """Of the values."""
        return self.tables[0].dtype

    def read(self, ids: torch.Tensor) -> torch.Tensor:
        """Return rows by their numbers, on the CPU: ``ids.shape + row_shape``. Blocks; all tables are read at the same time.

        Raises:
            IndexError: For a number that is no row's; nothing is read then.
            TypeError, ValueError, RowsUnreadable, OSError: As :meth:`Table.read` does.
        """
        parts = self._parts(ids)
        reads = [(where, self.tables[number].read_async(rows)) for number, where, rows in parts]
        found = torch.empty(ids.numel(), *self.row_shape, dtype=self.dtype)
        for where, future in reads:
            found[where] = future.result()
        return found.view(*ids.shape, *self.row_shape)

    def prefetch(self, ids: torch.Tensor) -> None:
        """Start reading rows into memory that will be asked for soon; return at once."""
        for number, _, rows in self._parts(ids):
            self.tables[number].prefetch(rows)

    def _parts(self, ids: torch.Tensor) -> list[tuple[int, torch.Tensor, torch.Tensor]]:
        """Return for each table that has some of the rows: its number, where they are in the ids, and their numbers in it."""
        if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
            raise TypeError(f"ids must be integers, got {ids.dtype}")
        numbers = ids.detach().to("cpu", torch.int64).flatten()
        outside = ((numbers < 0) | (numbers >= self.rows)).nonzero()
        if len(outside):
            position = int(outside[0])
            raise IndexError(
                f"ids.flatten()[{position}] is {int(numbers[position])}, and the table has the rows 0 to {self.rows - 1}"
            )
        owners = torch.bucketize(numbers, torch.tensor(self._ends), right=True)
        parts = []
        for number in sorted(set(owners.tolist())):
            where = (owners == number).nonzero().flatten()
            begin = self._ends[number] - self.tables[number].rows
            parts.append((number, where, numbers[where] - begin))
        return parts

    def table_of(self, row: int) -> tuple[Table, int]:
        """Return the table that has a row, and the row's number in it."""
        if not 0 <= row < self.rows:
            raise IndexError(f"row {row} is none of 0 to {self.rows - 1}")
        number = bisect.bisect_right(self._ends, row)
        return self.tables[number], row - self._ends[number] + self.tables[number].rows

    def close(self) -> None:
        """Close all tables."""
        for table in self.tables:
            table.close()

    def __repr__(self) -> str:
        return f"RowShards(shape={self.shape}, dtype={self.dtype}, tables={len(self.tables)})"


def open_ngram_tables(
    path: AnyPath,
    names: str = r".*",
    *,
    shard_name: str = SHARD_NAME,
    memory_budget: int = DEFAULT_MEMORY_BUDGET,
    config: AioConfig | None = None,
) -> dict[str, RowShards]:
    """Open the embedding tables of a model where they are, without a copy.

    Args:
        path: A ``.safetensors`` file, an ``index.json`` of several, or a directory with one of these.
        names: Pattern of the tables' names, all of which has to match. Tensors of one dimension are no tables.
        shard_name: Pattern of the names of tensors that have some rows of a table each, with the groups ``table``, ``number`` and
            ``rest``: the table's name is ``table`` and ``rest``.
        memory_budget: Bytes of memory for all tables together, shared in proportion to their sizes.
        config: Settings of the engine; None for the profile of the drive.

    Returns:
        The tables by name, in the file's order: each of one tensor, or of several in the order of their numbers.

    Raises:
        ValueError: If no name matches, or the numbers of a table's tensors are not 0, 1, 2 and so on.
        FileNotFoundError: If a file is missing.
    """
    byte_count(memory_budget, "memory_budget")
    tables: dict[str, list[tuple[int, str, Location]]] = {}
    for name, weight in weights_in(Path(os.fsdecode(path))).items():
        if not isinstance(weight, Location) or len(weight.info.shape) < 2:
            continue
        shard = re.fullmatch(shard_name, name)
        table = name if shard is None else shard["table"] + (shard["rest"] or "")
        if re.fullmatch(names, table):
            tables.setdefault(table, []).append((0 if shard is None else int(shard["number"]), name, weight))
    if not tables:
        raise ValueError(f"'{os.fsdecode(path)}' has no table whose name matches {names!r}")
    whole = sum(weight.info.nbytes for shards in tables.values() for _, _, weight in shards)
    opened: dict[str, RowShards] = {}
    made: list[Table] = []
    try:
        for table, shards in tables.items():
            shards.sort(key=lambda shard: shard[0])
            if [number for number, _, _ in shards] != list(range(len(shards))):
                raise ValueError(f"the table {table!r} has the parts {[name for _, name, _ in shards]}: some are missing")
            for _, name, weight in shards:
                budget = memory_budget * weight.info.nbytes // max(whole, 1)
                made.append(Table.open(weight.path, name, memory_budget=budget, config=config))
            opened[table] = RowShards(made[-len(shards) :])
    except BaseException:
        for each in made:
            each.close()
        raise
    return opened
