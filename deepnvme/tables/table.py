"""A table: rows on one or several drives, read and changed by their numbers."""

from __future__ import annotations

import copy
import functools
import operator
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import torch

from deepnvme._former_names import former_names
from deepnvme.drives.aio_config import AioConfig
from deepnvme.drives.mounts import warn_of_memory
from deepnvme.drives.profiles import AnyPath
from deepnvme.memory.budget import MemoryBudget, budget_bytes
from deepnvme.telemetry.descriptions import path_list, representation, size_for_people, state_text
from deepnvme.telemetry.sizes import ByteCount, byte_count

from .creating import create_files
from .layout import State, columns_of
from .manifest import load_manifest
from .opening import find_layout
from .reading import DEFAULT_STAGING_BYTES
from .row_scales import RowScales
from .rows_future import RowsFuture, checked_ids, values_for
from .session import TableSession, TableStats

if TYPE_CHECKING:
    from typing_extensions import Unpack

DEFAULT_MEMORY_BUDGET = 64 << 20


class TableMemory(TypedDict, total=False):
    """Keyword arguments for memory and engine that functions which open tables pass on to :meth:`Table.open`."""

    memory_budget: MemoryBudget
    staging_bytes: ByteCount
    aio_config: AioConfig | None


def as_paths(paths: AnyPath | Iterable[AnyPath]) -> list[Path]:
    """Return one path, or several, as absolute paths, those given as bytes decoded with the file system's encoding.

    Raises ValueError if there is none, or one is given twice.
    """
    given = [paths] if isinstance(paths, str | bytes | os.PathLike) else list(paths)
    found = [Path(os.path.abspath(os.fsdecode(each))) for each in given]
    if not found or len(set(found)) < len(found):
        raise ValueError(f"a table needs a directory, or several different ones, got {', '.join(map(str, found)) or 'none'}")
    return found


class Table:
    """Rows of equal shape on a drive, or striped over several, that are read by their numbers: thousands at a time.

    >>> table = Table.from_tensor("/mnt/nvme/features", features)
    >>> rows = table.read(torch.tensor([[3, 1], [4, 1]]))    # shape (2, 2, ...)

    Made by :meth:`create`, :meth:`from_tensor` or :meth:`open`. The most used rows stay in memory, within a budget.
    Thread-safe.

    A forked child opens the table again, read-only, when it uses it. So does a process that gets a pickled copy, such as a
    DataLoader worker. While a writer has the table open, that raises StoreLocked.
    """

    session: TableSession
    """The open files. Used by this package only."""

    def __init__(self, session: TableSession, reopen: Callable[[], Table], scales: RowScales | None = None) -> None:
        """Make a table of an open session. ``reopen`` opens the table in another process; it is pickled for that."""
        self.session, self._reopen, self._scales = session, reopen, scales
        self._layout = session.layout
        self.memory_budget = session.memory_budget
        """Bytes of memory for rows that stay in memory."""
        self.staging_bytes = session.staging_bytes
        """Bytes of pinned memory through which rows are read and written."""

    # -- making one

    @classmethod
    @former_names(config="aio_config")
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
        aio_config: AioConfig | None = None,
    ) -> Table:
        """Create a new table, and open it. Blocks until its rows are on stable storage.

        Args:
            paths: A directory, which is created if it is missing, or several on different drives, over which the rows are
                striped.
            rows: Number of rows.
            shape: Shape of one row.
            dtype: Dtype of the values.
            values: Returns rows ``begin`` to ``end``, of shape ``(end - begin, *shape)``; called for all rows in their order,
                some thousand at a time. None for zeros.
            states: Optimizer states that are kept beside each row, by name.
            updatable: Whether rows can be changed later. Each row then takes twice its bytes, and whole sectors: see
                docs/tables.md.
            memory_budget: As for :meth:`open`.
            staging_bytes: As for :meth:`open`.
            aio_config: Settings of the engine; None for the profile of the drive.

        Raises:
            FileExistsError: If there is a table already, or rows left by a killed process.
            ValueError: For a row shape without bytes, or if ``values`` returns another shape or dtype.
            OSError: If the drive cannot be read or written. ENOSPC, if there is too little space, comes before anything is
                written. All files are removed then.
        """
        memory_budget = budget_bytes(memory_budget, "memory_budget")
        staging_bytes = byte_count(staging_bytes, "staging_bytes")
        columns = columns_of(dtype, (shape,) if isinstance(shape, int) else shape, states)
        directories = as_paths(paths)
        if operator.index(rows) < 0:
            raise ValueError(f"rows must not be negative, got {rows}")
        initial = {name: state.initial for name, state in (states or {}).items()}
        warn_of_memory(directories)
        create_files(directories, rows, columns, values, initial, updatable, aio_config)
        return cls.open(
            directories, writable=updatable, memory_budget=memory_budget, staging_bytes=staging_bytes, aio_config=aio_config
        )

    @classmethod
    def from_tensor(
        cls, paths: AnyPath | Sequence[AnyPath], tensor: torch.Tensor, *, updatable: bool = False, **memory: Unpack[TableMemory]
    ) -> Table:
        """Make a table of the rows of a tensor: ``tensor[i]`` is row i. The tensor may be mapped from a file, of any size.

        Args:
            paths: As for :meth:`create`.
            tensor: The rows, on the CPU or a CUDA device.
            updatable: As for :meth:`create`, but False by default.
            **memory: ``memory_budget``, ``staging_bytes`` and ``aio_config``, as for :meth:`create`.

        Raises the errors of :meth:`create`, and ValueError for a tensor without dimensions.
        """
        if tensor.dim() == 0:
            raise ValueError("a table is made of a tensor with rows, got one without dimensions")
        rows = tensor.detach()
        return cls.create(
            paths, len(rows), rows.shape[1:], rows.dtype, values=lambda begin, end: rows[begin:end], updatable=updatable, **memory
        )

    @classmethod
    @former_names(config="aio_config")
    def open(
        cls,
        paths: AnyPath | Sequence[AnyPath],
        name: str | None = None,
        *,
        dtype: torch.dtype | None = None,
        shape: int | Sequence[int] | None = None,
        offset: int = 0,
        scales: RowScales | None = None,
        writable: bool = False,
        memory_budget: MemoryBudget = DEFAULT_MEMORY_BUDGET,
        staging_bytes: ByteCount = DEFAULT_STAGING_BYTES,
        aio_config: AioConfig | None = None,
    ) -> Table:
        """Open a table, or a file whose rows can be read in place, without a copy.

        Args:
            paths: The directory of a table, or all its directories, in the order in which it was created. Or a ``.npy``,
                ``.safetensors`` or ``.pt`` file; or any other file of raw rows, as ``dtype`` and ``shape`` describe them.
            name: Name of the tensor in a ``.safetensors`` or ``.pt`` file that has several.
            dtype: Dtype of the values in a raw file.
            shape: Shape of one row in a raw file.
            offset: Bytes from the start of a raw file to its first row.
            scales: For rows in FP8 (float8_e4m3fn) of a file: their scales. Rows are dequantised as they are read. None for rows
                as they are in the file.
            writable: Whether rows will be changed; only for a table that was created ``updatable``. Such a table is open to one
                writer, or to any number of readers.
            memory_budget: Bytes of memory for rows that stay in memory, including the index to find them; or "8GB", "25%",
                "auto": see :data:`deepnvme.memory.MemoryBudget`. No more is used than the table has rows for.
            staging_bytes: Bytes of pinned memory, in addition to ``memory_budget``, through which rows are read and
                written, or a size such as "64MiB". Two thirds are for reads, and one third for writes if the table is
                ``writable``. Each has at least two parts of 256 KiB, or of a row if that is larger. The memory is
                allocated when it is first used.
            aio_config: Settings of the engine; None for the profile of the drive.

        Raises:
            FileNotFoundError: If there is no such file or table.
            StoreLocked: If a writer has the table open or, with ``writable``, readers have; the message names the holder. Tables
                that are no longer referenced are garbage-collected first.
            CorruptTable: If the table is damaged, or one of its files too short.
            ValueError: If the directories are not all those of one table, in the order of its creation; for a file whose rows are
                not contiguous, a raw file without ``dtype`` and ``shape``, ``scales`` that are not those of the rows, or
                ``writable`` for anything but an updatable table.
            OSError: From opening the files.
        """
        memory_budget = budget_bytes(memory_budget, "memory_budget")
        staging_bytes = byte_count(staging_bytes, "staging_bytes")
        given = as_paths(paths)
        path = given[0]
        reopen = functools.partial(
            cls.open, given, name, dtype=dtype, shape=shape, offset=offset, scales=scales,
            memory_budget=memory_budget, staging_bytes=staging_bytes, aio_config=aio_config,
        )  # fmt: skip
        if path.is_dir() and scales is not None:
            raise ValueError(f"'{path}' is a table: scales are for rows that lie in a file")
        if path.is_dir():
            layout, _ = load_manifest(given)
            if writable and not layout.updatable:
                raise ValueError(f"the rows of '{path}' cannot be changed: make a copy by Table.create(..., updatable=True)")
        elif writable or len(given) > 1:
            raise ValueError(f"'{path}' is no table whose rows can be changed: make one by Table.create")
        else:
            layout = find_layout(path, name, dtype, shape, offset)
            if scales is not None:
                scales.check(layout.rows, layout.values)
        directories = given if path.is_dir() else []
        return cls(TableSession(layout, directories, writable, memory_budget, staging_bytes, aio_config), reopen, scales)

    # -- what it is

    @property
    def rows(self) -> int:
        """Number of rows of the table."""
        return self._layout.rows

    def __len__(self) -> int:
        return self.rows

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Shape of one row, without the dimension of the rows."""
        return self._layout.values.shape

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of all rows together."""
        return (self.rows, *self.row_shape)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the rows' values, not of their states."""
        return self._layout.values.dtype if self._scales is None else self._scales.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the values of all rows, as they are on the drive, without their optimizer states."""
        return self.rows * self._layout.values.nbytes

    @property
    def states(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Optimizer states kept beside each row: by name, the dtype and the shape for one row."""
        return {each.name: (each.dtype, each.shape) for each in self._layout.columns[1:]}

    @property
    def directory(self) -> Path:
        """The table's first directory; for a file that is used as a table in place, the directory of the file."""
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

    def read(self, ids: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return rows by their numbers. Blocks.

        Args:
            ids: Row numbers: integers of any shape, in any order; a number may occur several times.
            out: A tensor of shape ``ids.shape + row_shape`` and the table's dtype for the rows, on any device. None for a new
                tensor.

        Returns:
            The rows, of shape ``ids.shape + row_shape``.

        Raises:
            IndexError: If a number is not that of a row; nothing is read then.
            TypeError: If ``ids`` are not integers, or ``out`` has another dtype.
            ValueError: If ``out`` has another shape; after :meth:`close`.
            RowsUnreadable: If some rows cannot be read; its ``failed`` names them. The other rows are in ``out`` nevertheless.
            OSError: If no row can be read, because the file was replaced or has changed its size.
        """
        future = _values_of(self.session, checked_ids(ids, self.rows), out, self._scales)
        failure = future.read_now()
        rows = future.rows()
        if failure is not None:
            raise failure
        return rows

    def read_async(self, ids: torch.Tensor, out: torch.Tensor | None = None) -> RowsFuture:
        """Start reading rows, and return a future once all reads are in flight.

        Blocks while all staging memory is in use. Rows that are changed before ``result()`` has returned may be old or new.
        Arguments and errors are those of :meth:`read`.

        Returns:
            A future, whose ``result()`` returns the rows. Until then, ``out`` must not be touched, and its storage must not be
            resized. If ``out`` is contiguous and on the CPU, the rows are read into the storage that it has at the call.
        """
        numbers = checked_ids(ids, self.rows)
        if self.writable:
            numbers = numbers.clone()  # for a second read, when the caller may have changed them
        future = _values_of(self.session, numbers, out, self._scales)
        future.start()
        return future

    def prefetch(self, ids: torch.Tensor) -> None:
        """Start reading rows that will be needed soon into memory; return at once. A later read of these rows waits for them.

        If the memory budget has no room for all prefetched rows, later ones evict earlier ones. Errors from the drive are
        raised by the later read.

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

    # -- changing

    def write(self, ids: torch.Tensor, rows: torch.Tensor) -> None:
        """Change rows in memory. Reads see the changes at once; they are durable after :meth:`commit`.

        Blocks while memory is full of changed rows.

        Args:
            ids: Row numbers. If a number occurs several times, the last occurrence counts.
            rows: New values of the rows, of shape ``ids.shape + row_shape`` and the table's dtype.

        Raises:
            IndexError, TypeError, ValueError: As for :meth:`read`; nothing is changed then.
            PermissionError: If the table was not opened ``writable``.
            OSError: If the drive cannot be read, or rows changed earlier cannot be written. Some of these rows may be changed.
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
        """Return rows with their optimizer states: a tensor for ``"values"``, and one for each name in :attr:`states`. Blocks.

        Args:
            ids: Row numbers, of one dimension.
            keep: Whether all these rows stay in memory, as far as there is room, because they will be changed. If False,
                they stay only if they are used often enough, as with :meth:`read`.

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
        """Change rows and their optimizer states in memory, as :meth:`write` does.

        Args:
            ids: Row numbers, of one dimension, each at most once.
            columns: Values and states by name, of shape ``(len(ids), ...)`` and the dtypes of the table. Columns that are
                not given stay as they are.

        Raises:
            IndexError, TypeError, ValueError, PermissionError, OSError: As :meth:`write` does; ValueError also for unknown
                names.
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
        """Attributes given to the last :meth:`commit`, such as the number of steps."""
        with self.session.lock:
            return copy.deepcopy(dict(self.session.epochs.attributes))

    def commit(self, attributes: Mapping[str, Any] | None = None) -> int:
        """Commit all changes so far atomically: after a crash at any time, the table is at this commit or at the previous one.

        Blocks until the commit is on stable storage. Does nothing if nothing was changed since the last commit.

        Args:
            attributes: Stored with the commit and returned by :attr:`attributes`: anything that JSON can hold. None keeps the
                attributes of the last commit.

        Returns:
            The number of the commit. Numbers increase.

        Raises:
            PermissionError: If the table was not opened ``writable``.
            OSError: If the drive cannot be read or written (ENOSPC and others). The previous commit is still the last one, the
                changes are still in memory, and commit() may be called again. If a flush failed, changes may be lost, and each
                commit() raises the flush's error until :meth:`rollback`.
        """
        with self.session.lock:
            return self.session.writer_here().commit(attributes)

    def rollback(self) -> None:
        """Undo all changes since the last commit. Raises PermissionError or OSError; after an OSError, call it again."""
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
            OSError: If the drive cannot be read or written. The table is closed nevertheless.
        """
        self.session.close()

    def __enter__(self) -> Table:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return self._reopen, ()


def _values_of(
    session: TableSession, numbers: torch.Tensor, out: torch.Tensor | None, scales: RowScales | None
) -> RowsFuture:  # fmt: skip
    """Return a read of rows without their states. The read is not started."""
    values = session.layout.values
    wanted = values if scales is None else values._replace(dtype=scales.dtype)
    return RowsFuture(session, numbers, values_for(numbers, out, wanted), values.nbytes, scales=scales)


def _read_records(session: TableSession, numbers: torch.Tensor, records: torch.Tensor, keep: bool = True) -> None:
    failure = RowsFuture(session, numbers, records, session.layout.record_bytes, keep).read_now()
    if failure is not None:
        raise failure


def _change(
    session: TableSession, numbers: torch.Tensor, fill: Callable[[int, int, torch.Tensor], object], all_columns: bool
) -> None:
    """Change the records of rows in the cache, some at a time.

    ``fill(begin, end, records)`` writes the new values of ``numbers[begin:end]`` into their records. The records are read
    first, unless ``all_columns`` says that ``fill`` overwrites every column.
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
    """Return the distinct numbers, ascending, and for each the position of its last occurrence."""
    ordered, positions = torch.sort(numbers, stable=True)
    last = torch.ones(ordered.numel(), dtype=torch.bool)
    if ordered.numel():
        last[:-1] = ordered[1:] != ordered[:-1]
    return ordered[last].contiguous(), positions[last]


def _require(tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, name: str) -> None:
    """Raise ValueError, which names the tensor ``name``, if its shape or dtype differs."""
    if tensor.dtype != dtype or tuple(tensor.shape) != shape:
        raise ValueError(f"{name} must have the shape {shape} in {dtype}, got {tuple(tensor.shape)} in {tensor.dtype}")
