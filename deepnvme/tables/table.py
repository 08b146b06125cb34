"""A table of rows on a drive, or on several, read by their numbers."""

from __future__ import annotations

import copy
import functools
import operator
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict

import torch

from deepnvme.drives.aio_config import AioConfig
from deepnvme.drives.profiles import AnyPath
from deepnvme.memory.budget import MemoryBudget, budget_bytes
from deepnvme.telemetry.descriptions import path_list, representation, size_for_people, state_text
from deepnvme.telemetry.sizes import ByteCount, byte_count

from .creating import create_files
from .identity import check_identity, directories_of
from .layout import State, columns_of
from .manifest import NO_COMMITS, ROWS_NAME, load_manifest
from .opening import find_layout
from .reading import DEFAULT_STAGING_BYTES
from .rows_future import PartialRows, RowsFuture, checked_ids, values_for
from .session import TableSession, TableStats

if TYPE_CHECKING:
    from typing_extensions import Unpack

Errors = Literal["raise", "partial"]
"""What happens if rows cannot be read: an exception, or the others are returned."""

DEFAULT_MEMORY_BUDGET = 64 << 20


class TableMemory(TypedDict, total=False):
    """Arguments of :meth:`Table.open` that whatever opens tables passes on to it."""

    memory_budget: MemoryBudget
    staging_bytes: ByteCount
    config: AioConfig | None


def as_paths(paths: AnyPath | Iterable[AnyPath]) -> list[Path]:
    """Return one path, or several, as a list. Paths that are bytes are decoded as the file system's names are."""
    given = [paths] if isinstance(paths, str | bytes | os.PathLike) else list(paths)
    return [Path(os.fsdecode(each)) for each in given]


def _as_directories(paths: AnyPath | Iterable[AnyPath]) -> list[Path]:
    """Return one directory, or several, as absolute paths. Raises ValueError if there is none, or one is given twice."""
    found = [Path(os.path.abspath(each)) for each in as_paths(paths)]
    if not found:
        raise ValueError("a table needs a directory, got none")
    if len(set(found)) < len(found):
        raise ValueError(f"a directory is given twice: {', '.join(map(str, found))}")
    return found


class Table:
    """Rows of equal shape on a drive, or striped over several, that are read by their numbers: thousands at a time.

    >>> table = Table.from_tensor("/mnt/nvme/features", features)
    >>> rows = table.read(torch.tensor([[3, 1], [4, 1]]))    # shape (2, 2, ...)

    Made by :meth:`create`, :meth:`from_tensor` or :meth:`open`. The rows used most often stay in memory, within a budget.
    Thread-safe.

    A forked child, and a pickled copy such as a DataLoader worker's, opens the table again, to read it.
    """

    session: TableSession
    """The open files. Used by this package only."""

    def __init__(self, session: TableSession, reopen: Callable[[], Table]) -> None:
        """``reopen`` opens the table in another process: it is pickled."""
        self.session, self._reopen = session, reopen
        self._layout = session.layout
        self.memory_budget = session.memory_budget
        """Bytes of memory for rows."""
        self.staging_bytes = session.staging_bytes
        """Bytes of pinned memory for rows on their way."""

    # -- making one

    @classmethod
    def create(
        cls,
        paths: AnyPath | Sequence[AnyPath],
        rows: int,
        shape: int | Sequence[int],
        dtype: torch.dtype,
        *,
        values: Callable[[int, int], torch.Tensor] | None = None,
        states: Mapping[str, State] | None = None,
        updatable: bool = True,
        memory_budget: MemoryBudget = DEFAULT_MEMORY_BUDGET,
        staging_bytes: ByteCount = DEFAULT_STAGING_BYTES,
        config: AioConfig | None = None,
    ) -> Table:
        """Make a new table and open it. Blocks until its rows are on the drive.

        Args:
            paths: A directory, which is created if it is missing, or several on different drives, over which the rows are
                striped.
            rows: Number of rows.
            shape: Shape of one row.
            dtype: Dtype of the values.
            values: Returns rows ``begin`` to ``end``, of shape ``(end - begin, *shape)``; called for all rows in their order,
                some thousand at a time. None for zeros.
            states: Optimizer states that are kept beside each row, by name.
            updatable: Whether rows can be changed. Each then takes twice its bytes, and whole sectors: see docs/tables.md.
            memory_budget: As for :meth:`open`.
            staging_bytes: As for :meth:`open`.
            config: Settings of the engine; None for the profile of the drive.

        Raises:
            FileExistsError: If there is a table already.
            ValueError: For a shape without bytes, or values of another shape or dtype.
            OSError: From the drive; ENOSPC before anything is written if there is too little space. Nothing is left then.
        """
        memory_budget = budget_bytes(memory_budget, "memory_budget")
        staging_bytes = byte_count(staging_bytes, "staging_bytes")
        columns = columns_of(dtype, (shape,) if isinstance(shape, int) else shape, states)
        directories = _as_directories(paths)
        if operator.index(rows) < 0:
            raise ValueError(f"rows must not be negative, got {rows}")
        initial = {name: state.initial for name, state in (states or {}).items()}
        create_files(directories, rows, columns, values, initial, updatable, config)
        return cls.open(paths, writable=updatable, memory_budget=memory_budget, staging_bytes=staging_bytes, config=config)

    @classmethod
    def from_tensor(
        cls, paths: AnyPath | Sequence[AnyPath], tensor: torch.Tensor, *, updatable: bool = False, **memory: Unpack[TableMemory]
    ) -> Table:
        """Make a table of the rows of a tensor: ``tensor[i]`` is row i. The tensor may be mapped from a file, of any size.

        Arguments and errors are those of :meth:`create`.
        """
        if tensor.dim() == 0:
            raise ValueError("a table is made of a tensor with rows, got one without dimensions")
        rows = tensor.detach()
        return cls.create(
            paths, len(rows), rows.shape[1:], rows.dtype, values=lambda begin, end: rows[begin:end], updatable=updatable, **memory
        )

    @classmethod
    def open(
        cls,
        paths: AnyPath | Sequence[AnyPath],
        name: str | None = None,
        *,
        dtype: torch.dtype | None = None,
        shape: int | Sequence[int] | None = None,
        offset: int = 0,
        writable: bool = False,
        memory_budget: MemoryBudget = DEFAULT_MEMORY_BUDGET,
        staging_bytes: ByteCount = DEFAULT_STAGING_BYTES,
        config: AioConfig | None = None,
    ) -> Table:
        """Open a table, or a file that is one already, without a copy.

        Args:
            paths: The directory of a table, or of one over several drives the first; if it was copied or moved, all of them, in
                the order in which it was created. Or a ``.npy`` file; a ``.safetensors`` or ``.pt`` file; or any other file,
                whose rows are as ``dtype`` and ``shape`` say.
            name: Name of the tensor in a ``.safetensors`` or ``.pt`` file that has several.
            dtype: Dtype of the values in a raw file.
            shape: Shape of one row in a raw file.
            offset: Bytes from the start of a raw file to its first row.
            writable: Whether rows will be changed: of tables that were created ``updatable``. There is one writer at a time,
                and any number of readers beside it, which see its last commit.
            memory_budget: Bytes of rows that stay in memory, with what is needed to find them; or "8GB", "25%", "auto": see
                :data:`deepnvme.memory.MemoryBudget`. No more is used than the table has rows for.
            staging_bytes: Bytes of pinned memory for rows on their way, besides, or a size such as "64MiB": two thirds for reads,
                and one third for writes if the table is ``writable``. It is allocated when it is first used. At least two parts
                of 256 KiB, or of a row if that is larger, are used for each.
            config: Settings of the engine; None for the profile of the drive.

        Raises:
            FileNotFoundError: If there is no such file or table.
            StoreLocked: If another writer has the table, who is named. One that nobody has any more is collected first.
            CorruptTable: If the table is damaged, or one of its files too short.
            ValueError: For directories that do not belong together, or not in this order; a file whose rows do not lie one after
                the other, a raw file without ``dtype`` and ``shape``, or ``writable`` for what is not an updatable table.
            OSError: From opening it.
        """
        memory_budget = budget_bytes(memory_budget, "memory_budget")
        staging_bytes = byte_count(staging_bytes, "staging_bytes")
        given = _as_directories(paths)
        first = given[0]
        reopen = functools.partial(
            cls.open, given, name, dtype=dtype, shape=shape, offset=offset, memory_budget=memory_budget,
            staging_bytes=staging_bytes, config=config,
        )  # fmt: skip
        directories, epochs = None, NO_COMMITS
        if first.is_dir():
            layout, epochs = load_manifest(first)
            directories = directories_of(given, layout, epochs)
            layout = replace(layout, files=tuple(each / ROWS_NAME for each in directories))
            if writable and not layout.updatable:
                check_identity(layout, epochs)  # else version_bytes is damaged
                raise ValueError(f"the rows of '{first}' cannot be changed: make a copy by Table.create(..., updatable=True)")
        elif writable:
            raise ValueError(f"'{first}' is no table whose rows can be changed: make one by Table.create")
        elif len(given) > 1:
            raise ValueError(f"'{first}' is no table's directory: give one file, got {len(given)}")
        else:
            layout = find_layout(first, name, dtype, shape, offset)
        return cls(TableSession(layout, directories, epochs, writable, memory_budget, staging_bytes, config), reopen)

    # -- what it is

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self._layout.rows

    def __len__(self) -> int:
        return self.rows

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Shape of one row."""
        return self._layout.values.shape

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of all rows together."""
        return (self.rows, *self.row_shape)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the values."""
        return self._layout.values.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of all rows, without their states."""
        return self.rows * self._layout.values.nbytes

    @property
    def states(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Optimizer states beside each row: dtype and shape of one row's, by name."""
        return {each.name: (each.dtype, each.shape) for each in self._layout.columns[1:]}

    @property
    def directory(self) -> Path:
        """The directory of the table's file, or of the first of several."""
        return self._layout.files[0].parent

    @property
    def writable(self) -> bool:
        """Whether rows can be changed by this object."""
        return self.session.writer is not None

    def __repr__(self) -> str:
        return representation(
            self,
            lambda: path_list(self._layout.files[:1]) + (f" and {more} more" if (more := len(self._layout.files) - 1) else ""),
            lambda: f"shape={self.shape}",
            lambda: f"dtype={self.dtype}",
            lambda: f"memory_budget={size_for_people(self.memory_budget)}",
            lambda: "writable" if self.writable else "",
            lambda: state_text(self.session.closed),
        )

    # -- reading

    def read(self, ids: torch.Tensor, out: torch.Tensor | None = None, *, errors: Errors = "raise") -> torch.Tensor | PartialRows:
        """Return rows by their numbers. Blocks.

        Beside a writer in another process, a read that a commit overtakes is made once more: it ends if it takes less time than
        passes between two commits.

        Args:
            ids: Integers of any shape and in any order; the same may occur more than once.
            out: A tensor of shape ``ids.shape + row_shape`` and the table's dtype to put them in, on any device. None for a
                new one.
            errors: "raise", or "partial" to have the rows that can be read although others cannot.

        Returns:
            The rows, of shape ``ids.shape + row_shape``; with ``errors="partial"`` a :class:`PartialRows`.

        Raises:
            IndexError: For a number that is no row's; nothing is read then.
            TypeError: If ``ids`` are no integers, or ``out`` has another dtype.
            ValueError: If ``out`` has another shape; after :meth:`close`.
            RowsUnreadable: If rows cannot be read. The others are in ``out`` nevertheless.
            OSError: If none can, because the file was replaced or has changed its size.
        """
        if errors not in ("raise", "partial"):
            raise ValueError(f'errors must be "raise" or "partial", got {errors!r}')
        future = _values_of(self.session, checked_ids(ids, self.rows), out)
        failure = future.read_now()
        if errors == "partial":
            return PartialRows(future.rows(), () if failure is None else failure.failed, future.failed_positions())
        if failure is not None:
            raise failure
        return future.rows()

    def read_async(self, ids: torch.Tensor, out: torch.Tensor | None = None) -> RowsFuture:
        """Start reading rows; return as soon as all reads are under way, which takes as long as all staging memory is in use.

        Rows that are changed before ``result()`` has returned may be old or new. Arguments and errors are those of :meth:`read`.

        Returns:
            A future, whose ``result()`` is the rows. ``out`` must not be touched before, and its storage must not be resized. If
            ``out`` is contiguous and on the CPU, the rows are read into the storage that it has at the call.
        """
        numbers = checked_ids(ids, self.rows)
        if self._layout.updatable:
            numbers = numbers.clone()  # for a second read, when the caller may have changed them
        future = _values_of(self.session, numbers, out)
        future.start()
        return future

    def prefetch(self, ids: torch.Tensor) -> None:
        """Start reading rows into memory that will be asked for soon; return at once. A read of the same rows waits for them.

        More rows than the memory budget has room for push one another out. Errors are raised when the rows are read.

        Raises:
            IndexError, TypeError, ValueError: As :meth:`read` does.
        """
        numbers = checked_ids(ids, self.rows)
        session = self.session
        with session.lock:
            reader = session.reader_here()
            if session.cache.slots:
                reader.prefetch(numbers.flatten())
                session.background.wake()

    def pin(self, ids: torch.Tensor) -> int:
        """Keep rows in memory, such as rows that are known to be used most. Blocks until they are read.

        At most nine tenths of the memory's rows are pinned, in the order of ``ids``: further ones are not. Pinned rows that have
        to be read once more, because another process has committed or after :meth:`rollback`, stay from when they are read.

        Returns:
            How many rows are pinned now.

        Raises:
            IndexError, TypeError, ValueError, OSError: As :meth:`read` does.
        """
        numbers = checked_ids(ids, self.rows).flatten()
        session = self.session
        with session.lock:
            reader, cache = session.reader_here(), session.cache
            absent = cache.pin(numbers.data_ptr(), numbers.numel(), cache.slots * 9 // 10)
            reader.load(numbers[torch.tensor(absent, dtype=torch.int64)])
            return cache.pinned

    def unpin(self) -> None:
        """Unpin all rows."""
        with self.session.lock:
            self.session.reader_here()
            self.session.cache.unpin_all()

    # -- changing

    def write(self, ids: torch.Tensor, rows: torch.Tensor) -> None:
        """Change rows. Reads see it at once; it is on the drive after :meth:`commit`. Blocks while memory is full of changed
        rows.

        Args:
            ids: Numbers of the rows. Of equal numbers the last one counts.
            rows: Their values, of shape ``ids.shape + row_shape`` and the table's dtype.

        Raises:
            IndexError, TypeError, ValueError: As for :meth:`read`; nothing is changed then.
            PermissionError: If the table was not opened ``writable``.
            OSError: From the drive: also if an earlier row could not be written. Some rows may be changed.
        """
        numbers = checked_ids(ids, self.rows)
        _require(rows, (*numbers.shape, *self.row_shape), self.dtype, "rows")
        numbers = numbers.flatten()
        rows = rows.detach().to("cpu").contiguous().view(numbers.numel(), *self.row_shape)
        numbers, last = _last_of_each(numbers)

        def fill(begin: int, end: int, records: torch.Tensor) -> None:
            self._layout.values.of(records).copy_(rows[last[begin:end]])

        _change(self.session, numbers, fill, all_columns=len(self._layout.columns) == 1)

    def read_records(self, ids: torch.Tensor, *, keep: bool = True) -> dict[str, torch.Tensor]:
        """Return rows with their states, by name: ``"values"``, and as :attr:`states` has them. Blocks.

        Args:
            ids: Numbers of rows, of one dimension.
            keep: Whether the rows stay in memory, as far as there is room, since they will be changed. If False, they stay if
                they are used often enough, as with :meth:`read`.

        Raises:
            IndexError, TypeError, ValueError, OSError: As :meth:`read` does.
        """
        numbers = checked_ids(ids, self.rows)
        if numbers.dim() != 1:
            raise ValueError(f"ids must have one dimension, got {numbers.dim()}")
        records = torch.empty(numbers.numel(), self._layout.record_bytes, dtype=torch.uint8)
        _read_records(self.session, numbers, records, keep)
        return {each.name: each.of(records) for each in self._layout.columns}

    def write_records(self, ids: torch.Tensor, columns: Mapping[str, torch.Tensor]) -> None:
        """Change rows and their states: as :meth:`write`, but numbers have one dimension, and each occurs once.

        Args:
            ids: Numbers of rows.
            columns: Values and states by name, of shape ``(len(ids), ...)`` and the dtypes of the table. Those that are missing
                stay as they are.

        Raises:
            IndexError, TypeError, ValueError, PermissionError, OSError: As :meth:`write` does; ValueError also for unknown names.
        """
        numbers = checked_ids(ids, self.rows)
        known = {each.name: each for each in self._layout.columns}
        if columns.keys() - known.keys():
            raise ValueError(f"the table has no {sorted(columns.keys() - known.keys())}, but {sorted(known)}")
        if numbers.dim() != 1:
            raise ValueError(f"ids must have one dimension, got {numbers.dim()}")
        for name, values in columns.items():
            _require(values, (numbers.numel(), *known[name].shape), known[name].dtype, name)

        def fill(begin: int, end: int, records: torch.Tensor) -> None:
            for name, values in columns.items():
                known[name].of(records).copy_(values[begin:end])

        _change(self.session, numbers, fill, all_columns=columns.keys() == known.keys())

    @property
    def attributes(self) -> dict[str, Any]:
        """The attributes of the last commit, such as a number of steps."""
        with self.session.lock:
            return copy.deepcopy(dict(self.session.epochs.attributes))

    def commit(self, attributes: Mapping[str, Any] | None = None) -> int:
        """Make the changes so far the table's last commit, as a whole: after a crash at any time it is that, or the one before.

        Blocks until it is on stable storage. Without changes since the last commit it does nothing.

        Args:
            attributes: Committed with the rows, for :attr:`attributes`: anything that JSON can hold. None keeps the attributes.

        Returns:
            The number of the commit, which grows.

        Raises:
            PermissionError: If the table was not opened ``writable``.
            OSError: From the drive, such as ENOSPC. The last commit is the one before then; the changes are still there, and
                commit() may be called again. After a flush that failed they may be lost, and each commit() raises its error
                until :meth:`rollback`.
        """
        with self.session.lock:
            return self.session.writer_here().commit(attributes)

    def rollback(self) -> None:
        """Undo the changes since the last commit. Raises PermissionError and OSError; call it again after the latter."""
        with self.session.lock:
            self.session.writer_here().rollback()

    # -- the end, and other processes

    def stats(self) -> TableStats:
        """Return the counters since the table was opened in this process."""
        with self.session.lock:
            return self.session.stats()

    def close(self) -> None:
        """Close the files. Uncommitted changes are lost. Idempotent.

        Raises:
            OSError: From the drive. The table is closed nevertheless.
        """
        self.session.close()

    def __enter__(self) -> Table:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return self._reopen, ()


def _values_of(session: TableSession, numbers: torch.Tensor, out: torch.Tensor | None) -> RowsFuture:
    """Return a read of rows without their states, which has not begun."""
    values = session.layout.values
    return RowsFuture(session, numbers, values_for(numbers, out, values), values.nbytes)


def _read_records(session: TableSession, numbers: torch.Tensor, records: torch.Tensor, keep: bool = True) -> None:
    failure = RowsFuture(session, numbers, records, session.layout.record_bytes, keep).read_now()
    if failure is not None:
        raise failure


def _change(
    session: TableSession, numbers: torch.Tensor, fill: Callable[[int, int, torch.Tensor], object], all_columns: bool
) -> None:
    """Change rows, some at a time. ``fill(begin, end, records)`` puts new values of some numbers into their records, which are
    read before unless it fills all columns.
    """
    with session.lock:
        writer = session.writer_here()
        step = writer.rows_at_a_time
        for begin in range(0, numbers.numel(), step):
            some = numbers[begin : begin + step].contiguous()
            records = torch.zeros(some.numel(), session.layout.record_bytes, dtype=torch.uint8)
            if not all_columns:
                _read_records(session, some, records)
            fill(begin, begin + some.numel(), records)
            writer.change(some, records)
            session.background.wake()


def _last_of_each(numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each number once, ascending, and its last position."""
    ordered, positions = torch.sort(numbers, stable=True)
    last = torch.ones(ordered.numel(), dtype=torch.bool)
    if ordered.numel():
        last[:-1] = ordered[1:] != ordered[:-1]
    return ordered[last].contiguous(), positions[last]


def _require(tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, name: str) -> None:
    """Raise ValueError for another shape or dtype."""
    if tensor.dtype != dtype or tuple(tensor.shape) != shape:
        raise ValueError(f"{name} must have the shape {shape} in {dtype}, got {tuple(tensor.shape)} in {tensor.dtype}")
