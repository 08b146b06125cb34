"""Tables of n-gram embeddings, read from the safetensors files of a model where they are."""

from __future__ import annotations

import bisect
import contextlib
import itertools
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from deepnvme.checkpoint.weight_locations import Location, weights_in
from deepnvme.drives.aio_config import AioConfig
from deepnvme.memory.budget import MemoryBudget, budget_bytes
from deepnvme.telemetry.sizes import ByteCount, byte_count

from .paths import AnyPath
from .reading import FailedRow, RowsFuture, RowsUnreadable
from .row_ids import checked_ids
from .row_read import PartialRows
from .staging import DEFAULT_STAGING_BYTES
from .table import DEFAULT_MEMORY_BUDGET, Errors, Table
from .table_stats import TableStats

SHARD_NAME = r"(?P<table>.+?)[._-](?:shard|part)[._-]?(?P<number>\d+)(?P<rest>\.\w+)?"
"""What the name of a tensor looks like that has some rows of a table: "ngram.shard_3.weight" is the fourth of "ngram.weight"."""


class ShardsFuture:
    """Rows of several tables that are being read, by :meth:`RowShards.read_async`."""

    def __init__(self, futures: Sequence[RowsFuture], finish: Callable[[], torch.Tensor]) -> None:
        self._futures = tuple(futures)
        self._finish: Callable[[], torch.Tensor] | None = finish
        self._rows: torch.Tensor | None = None

    def done(self) -> bool:
        """Return whether all rows are in memory, so that :meth:`result` does not wait for a drive. Never blocks."""
        return all(future.done() for future in self._futures)

    def result(self) -> torch.Tensor:
        """Wait for the rows, and return them: ``ids.shape + row_shape``. The same tensor each time.

        Raises:
            RowsUnreadable: If some could not be read.
        """
        if self._finish is not None:
            self._rows = self._finish()
            self._finish = None
        assert self._rows is not None
        return self._rows


class _ShardRead(NamedTuple):
    """The rows of one table that are being read for a caller."""

    begin: int
    """Number of the table's first row among those of all tables."""
    positions: torch.Tensor
    """Where the rows are in the flat ids."""
    rows: torch.Tensor
    """What they are read into."""
    future: RowsFuture


class RowShards:
    """Tables that are read as one: the rows of the first, then those of the second, and so on.

    Closes the tables when it is closed, also at the end of a with-statement.

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
        self._ends = list(itertools.accumulate(table.rows for table in tables))

    @property
    def rows(self) -> int:
        """Number of rows that all tables have together."""
        return self._ends[-1]

    def __len__(self) -> int:
        return self.rows

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Shape of one row, in each table."""
        return self.tables[0].row_shape

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the rows of all tables together."""
        return (self.rows, *self.row_shape)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the values, in each table."""
        return self.tables[0].dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the rows of all tables together."""
        return sum(table.nbytes for table in self.tables)

    def read(self, ids: torch.Tensor, out: torch.Tensor | None = None, *, errors: Errors = "raise") -> torch.Tensor | PartialRows:
        """Return rows by their numbers. Blocks; all tables are read at the same time.

        Arguments, result and errors are those of :meth:`Table.read`. A :class:`RowsUnreadable` has the failed rows of all tables,
        and what else it says of the first table that has any.
        """
        if errors not in ("raise", "partial"):
            raise ValueError(f'errors must be "raise" or "partial", got {errors!r}')
        numbers = checked_ids(ids, self.rows)
        rows = self._new_rows(numbers, out)
        failure = self._finish(self._start(numbers), rows)
        if errors == "raise":
            if failure is not None:
                raise failure
            return rows
        failed = () if failure is None else failure.failed
        bad = torch.isin(numbers.flatten(), torch.tensor([each.row for each in failed], dtype=torch.int64))
        return PartialRows(rows, failed, bad.nonzero().flatten())

    def read_async(self, ids: torch.Tensor, out: torch.Tensor | None = None) -> ShardsFuture:
        """Start reading rows from all tables that have some of them; return as :meth:`Table.read_async` does.

        Arguments and errors are those of :meth:`read`.

        Returns:
            A future, whose ``result()`` is the rows. ``out`` must not be touched before.
        """
        numbers = checked_ids(ids, self.rows)
        rows = self._new_rows(numbers, out)
        reads = self._start(numbers)

        def finish() -> torch.Tensor:
            """Return the rows when all tables have delivered theirs."""
            failure = self._finish(reads, rows)
            if failure is not None:
                raise failure
            return rows

        return ShardsFuture([read.future for read in reads], finish)

    def prefetch(self, ids: torch.Tensor) -> None:
        """Start reading rows into memory that will be asked for soon; return at once. See :meth:`Table.prefetch`."""
        for table, _, _, numbers in self._parts(checked_ids(ids, self.rows)):
            table.prefetch(numbers)

    def stats(self) -> tuple[TableStats, ...]:
        """Return what each table has done since it was opened."""
        return tuple(table.stats() for table in self.tables)

    def _new_rows(self, numbers: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        """Return the tensor for the rows of some numbers. Raises what :meth:`Table.read` does if it was given and is unfit."""
        shape = (*numbers.shape, *self.row_shape)
        if out is None:
            return torch.empty(shape, dtype=self.dtype)
        if out.dtype != self.dtype:
            raise TypeError(f"out must be of the tables' dtype {self.dtype}, got {out.dtype}")
        if tuple(out.shape) != shape:
            raise ValueError(f"out must have the shape {shape}, got {tuple(out.shape)}")
        return out

    def _start(self, numbers: torch.Tensor) -> list[_ShardRead]:
        """Start reading the rows of some numbers, from all tables that have any."""
        reads = []
        for table, begin, positions, own in self._parts(numbers):
            rows = torch.empty(len(own), *self.row_shape, dtype=self.dtype)
            reads.append(_ShardRead(begin, positions, rows, table.read_async(own, rows)))
        return reads

    def _finish(self, reads: Sequence[_ShardRead], out: torch.Tensor) -> RowsUnreadable | None:
        """Wait for all tables, and put their rows where they belong. Returns the error if some rows could not be read."""
        failure: RowsUnreadable | None = None
        failed: list[FailedRow] = []
        plain = out.device.type == "cpu" and out.is_contiguous() and not out.requires_grad
        flat = (out if plain else torch.empty(out.shape, dtype=self.dtype)).view(-1, *self.row_shape)
        for read in reads:
            try:
                read.future.result()
            except RowsUnreadable as error:  # the other rows were delivered
                failure = failure or error
                failed += [each._replace(row=each.row + read.begin) for each in error.failed]
            flat[read.positions] = read.rows
        if not plain:
            with torch.no_grad():
                out.copy_(flat.view(out.shape))
        if failure is not None:
            failure.failed = tuple(failed)
        return failure

    def _parts(self, numbers: torch.Tensor) -> Iterator[tuple[Table, int, torch.Tensor, torch.Tensor]]:
        """Return each table that has some of the rows, the number of its first row, where they are in the flat numbers, and their
        numbers in the table.
        """
        flat = numbers.flatten()
        owners = torch.bucketize(flat, torch.tensor(self._ends), right=True)
        for number in torch.unique(owners).tolist():
            positions = (owners == number).nonzero().flatten()
            table = self.tables[number]
            begin = self._ends[number] - table.rows
            yield table, begin, positions, flat[positions] - begin

    def table_of(self, row: int) -> tuple[Table, int]:
        """Return the table that has a row, and the row's number in it.

        Raises:
            IndexError: If no table has it.
        """
        if not 0 <= row < self.rows:
            raise IndexError(f"row {row} is none of 0 to {self.rows - 1}")
        number = bisect.bisect_right(self._ends, row)
        return self.tables[number], row - self._ends[number] + self.tables[number].rows

    def close(self) -> None:
        """Close all tables, also if one of them fails. Idempotent.

        Raises:
            OSError: From a drive. The tables are closed nevertheless.
        """
        with contextlib.ExitStack() as stack:
            for table in reversed(self.tables):
                stack.callback(table.close)

    def __enter__(self) -> RowShards:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"RowShards(shape={self.shape}, dtype={self.dtype}, tables={len(self.tables)})"


def open_ngram_tables(
    path: AnyPath,
    names: str = r".*",
    *,
    shard_name: str = SHARD_NAME,
    memory_budget: MemoryBudget = DEFAULT_MEMORY_BUDGET,
    staging_bytes: ByteCount = DEFAULT_STAGING_BYTES,
    config: AioConfig | None = None,
) -> dict[str, RowShards]:
    """Open the embedding tables of a model where they are, without a copy.

    Args:
        path: A ``.safetensors`` file, an ``index.json`` of several, or a directory with one of these.
        names: Pattern of the tables' names, all of which has to match. Tensors of one dimension are no tables.
        shard_name: Pattern of the names of tensors that have some rows of a table each, with the groups ``table``, ``number`` and
            ``rest``: the table's name is ``table`` and ``rest``.
        memory_budget: Bytes of memory for all tables together, shared in proportion to their sizes; or "8GB", "25%", "auto".
        staging_bytes: Bytes of pinned memory for rows on their way, of all tables together, shared equally. A table has at least
            512 KiB, or two rows.
        config: Settings of the engine; None for the profile of the drive.

    Returns:
        The tables by name, in the file's order: each of one tensor, or of several in the order of their numbers.

    Raises:
        ValueError: If no name matches, or the numbers of a table's tensors are not 0, 1, 2 and so on.
        FileNotFoundError: If a file is missing.
    """
    memory_budget = budget_bytes(memory_budget, "memory_budget")
    staging_bytes = byte_count(staging_bytes, "staging_bytes")
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
    staging = staging_bytes // sum(map(len, tables.values()))
    opened: dict[str, RowShards] = {}
    made: list[Table] = []
    try:
        for table, shards in tables.items():
            shards.sort(key=lambda shard: shard[0])
            if [number for number, _, _ in shards] != list(range(len(shards))):
                raise ValueError(f"the table {table!r} has the parts {[name for _, name, _ in shards]}: some are missing")
            for _, name, weight in shards:
                budget = memory_budget * weight.info.nbytes // max(whole, 1)
                made.append(Table.open(weight.path, name, memory_budget=budget, staging_bytes=staging, config=config))
            opened[table] = RowShards(made[-len(shards) :])
    except BaseException:
        for each in made:
            each.close()
        raise
    return opened
