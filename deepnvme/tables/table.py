"""A table of rows on a drive, or on several, read by their numbers."""

from __future__ import annotations

import contextlib
import copy
import errno
import operator
import os
import threading
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from deepnvme._interrupts import defer_interrupts
from deepnvme.drives.aio_config import AioConfig
from deepnvme.drives.profiles import engine_for
from deepnvme.engine import Engine, File
from deepnvme.files.directory_lock import DirectoryLock, DirectoryOwner
from deepnvme.memory.budget import MemoryBudget, budget_bytes
from deepnvme.memory.host import huge_pages
from deepnvme.ops import load_async_io
from deepnvme.telemetry.descriptions import path_list, representation, size_for_people, state_text
from deepnvme.telemetry.sizes import ByteCount, byte_count

from .background import BackgroundThread
from .creating import create_files
from .identity import LARGEST_SECTOR, check_identity, directories_of, file_bytes
from .layout import State, TableLayout, columns_of
from .manifest import ROWS_NAME, CorruptTable, Epochs, ManifestWatch, load_manifest
from .opening import CheckpointFormat, find_layout
from .paths import AnyPath, as_directories
from .reading import RowReader, RowsFuture, RowsUnreadable, unit_of
from .row_ids import checked_ids, last_of_each
from .row_read import PartialRows, RowRead
from .staging import DEFAULT_STAGING_BYTES
from .table_stats import TableStats
from .writing import RowWriter

if TYPE_CHECKING:
    from deepnvme.ops.aio.async_io_op.tables import RowCache

Errors = Literal["raise", "partial"]
"""What happens if rows cannot be read: an exception, or the others are returned."""

DEFAULT_MEMORY_BUDGET = 64 << 20
_FEWEST_SLOTS = 64
"""Rows that an updatable table has in memory at least."""
_LOCKED_REMEDY = "commit() what is to be kept, and call its close() (an embedding has it as .table)"
"""What to do about a table that another one is opened beside, both to be written."""


class Table:
    """Rows of equal shape on a drive, or striped over several, that are read by their numbers: thousands at a time.

    >>> table = Table.from_tensor("/mnt/nvme/features", features)
    >>> rows = table.read(torch.tensor([[3, 1], [4, 1]]))    # shape (2, 2, ...)

    Made by :meth:`create`, :meth:`from_tensor` or :meth:`open`. The rows used most often stay in memory, within a budget.
    Thread-safe.

    In a forked child, and in a copy that was pickled, as a DataLoader's workers have them, the table opens itself again to be
    read.
    """

    def __init__(
        self, layout: TableLayout, directories: list[Path] | None, epochs: Epochs, writable: bool, memory_budget: int,
        staging_bytes: int, config: AioConfig | None, source: Mapping[str, Any],
    ) -> None:  # fmt: skip
        self._layout, self._directories = layout, directories
        self._source, self._config = dict(source), config
        self.memory_budget = memory_budget
        """Bytes of memory for rows."""
        self.staging_bytes = staging_bytes
        """Bytes of pinned memory for rows on their way."""
        self._lock = threading.RLock()
        self._writer: RowWriter | None = None
        self._locks: list[DirectoryLock] = []
        self._manifest: ManifestWatch | None = None
        self._at_collection: weakref.finalize[Any, Table] | None = None
        self._generation = 0  # of a reader: how many commits it has gone on to
        self._open(epochs, writable)
        _opened.add(self)

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
            rows: How many.
            shape: Of one row.
            dtype: Of the values.
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
        directories = as_directories(paths)
        if operator.index(rows) < 0:
            raise ValueError(f"rows must not be negative, got {rows}")
        initial = {name: state.initial for name, state in (states or {}).items()}
        create_files(directories, rows, columns, values, initial, updatable, config)
        return cls.open(paths, writable=updatable, memory_budget=memory_budget, staging_bytes=staging_bytes, config=config)

    @classmethod
    def from_tensor(
        cls,
        paths: AnyPath | Sequence[AnyPath],
        tensor: torch.Tensor,
        *,
        updatable: bool = False,
        memory_budget: MemoryBudget = DEFAULT_MEMORY_BUDGET,
        staging_bytes: ByteCount = DEFAULT_STAGING_BYTES,
        config: AioConfig | None = None,
    ) -> Table:
        """Make a table of the rows of a tensor: ``tensor[i]`` is row i. It may be mapped from a file, of any size.

        Arguments and errors are those of :meth:`create`.
        """
        memory_budget = budget_bytes(memory_budget, "memory_budget")
        staging_bytes = byte_count(staging_bytes, "staging_bytes")
        if tensor.dim() == 0:
            raise ValueError("a table is made of a tensor with rows, got one without dimensions")
        return cls.create(
            paths,
            tensor.shape[0],
            tensor.shape[1:],
            tensor.dtype,
            values=lambda begin, end: tensor.detach()[begin:end],
            updatable=updatable,
            memory_budget=memory_budget,
            staging_bytes=staging_bytes,
            config=config,
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
            name: Of the tensor in a ``.safetensors`` or ``.pt`` file that has several.
            dtype: Of the values in a raw file.
            shape: Of one row in a raw file.
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
        given = as_directories(paths)
        first = given[0]
        source: dict[str, Any] = {"paths": given, "name": name, "dtype": dtype, "shape": shape, "offset": offset}
        if first.is_dir():
            layout, epochs = load_manifest(first)
            directories = directories_of(given, layout, epochs)
            layout = replace(layout, files=tuple(each / ROWS_NAME for each in directories))
            if writable and not layout.updatable:
                raise ValueError(f"the rows of '{first}' cannot be changed: make a copy by Table.create(..., updatable=True)")
            return cls(layout, directories, epochs, writable, memory_budget, staging_bytes, config, source)
        if writable:
            raise ValueError(f"'{first}' is no table whose rows can be changed: make one by Table.create")
        if len(given) > 1:
            raise ValueError(f"'{first}' is no table's directory: give one file, got {len(given)}")
        layout = find_layout(CheckpointFormat.of(first), first, name, dtype, shape, offset)
        return cls(layout, None, Epochs(), False, memory_budget, staging_bytes, config, source)

    def _open(self, epochs: Epochs, writable: bool) -> None:
        """Open the files, with an empty cache. Undone if it fails."""
        layout = self._layout
        self._pid = os.getpid()
        self._closed = False
        self._files: list[File] = []
        self._engine: Engine = engine_for(layout.files, self._config)
        try:
            if writable:
                assert self._directories is not None
                owner = DirectoryOwner("Table", _LOCKED_REMEDY)
                for directory in self._directories:
                    self._locks.append(DirectoryLock(directory, owner))
                _, epochs = load_manifest(self._directories[0])  # the writer before may have committed meanwhile
                epochs = epochs.begin()
            elif self._directories is not None and layout.updatable:
                self._manifest = ManifestWatch(self._directories[0])
                epochs = self._newest_epochs()  # the writer may have committed meanwhile
            for path in layout.files:
                self._files.append(self._engine.open(path, "r+" if writable else "r", whole_sectors=True))
            if self._directories is not None:
                epochs = self._check_identity(epochs)
            self._check_files(writable)
            self._memory, self._cache = self._new_cache(writable)
            self._show(epochs)
            self._reader = RowReader(self._engine, self._files, layout, self._cache, self._lock, self.staging_bytes * 2 // 3)
            if writable:
                assert self._directories is not None
                self._writer = RowWriter(
                    self._engine, self._files, layout, self._cache, self._reader, self._directories, epochs,
                    self.staging_bytes // 3,
                )  # fmt: skip
            self._background = BackgroundThread(self._lock, self._reader, self._writer)
            self._at_collection = weakref.finalize(
                self, _release_collected, self._pid, self._lock, self._background, self._writer, list(self._locks)
            )
        except BaseException:
            self._release()
            raise

    def _check_files(self, writable: bool) -> None:
        """Raise CorruptTable if a file has not the size of its rows, or its versions are too short for them; and ValueError if
        its rows cannot be changed here.
        """
        header = load_async_io().tables.VERSION_HEADER_BYTES
        version = self._layout.version_bytes
        if self._layout.updatable and version < header + self._layout.record_bytes:
            raise CorruptTable(self._layout.files[0], f"a row does not fit into the {version} bytes of a version")
        for volume, (path, file) in enumerate(zip(self._layout.files, self._files, strict=True)):
            wanted = self._layout.bytes_in(volume)
            size = file.size()
            if size < wanted or (self._directories is not None and size > file_bytes(self._layout, volume) + LARGEST_SECTOR):
                raise CorruptTable(path, f"it has {size} bytes, and {self._layout.rows} rows need {wanted}")
            if writable and self._layout.version_bytes % file.sector_size:
                raise ValueError(
                    f"'{path}' is on a drive with sectors of {file.sector_size} bytes, and versions of rows have"
                    f" {self._layout.version_bytes}: make a copy by Table.create"
                )

    def _check_identity(self, epochs: Epochs) -> Epochs:
        """Return the epochs of the manifest that the files belong to. Raises ValueError if they belong to none."""
        while True:
            try:
                check_identity(self._layout, epochs)
                return epochs
            except ValueError:
                if self._manifest is None or not self._manifest.replaced():
                    raise
            # A writer has given the table a new identity meanwhile.
            assert self._directories is not None
            self._manifest.close()
            self._manifest = ManifestWatch(self._directories[0])
            epochs = self._newest_epochs()

    def _new_cache(self, writable: bool) -> tuple[torch.Tensor, RowCache]:
        """Return the cache of the memory budget, and its memory."""
        native = load_async_io().tables
        layout = self._layout
        slot = native.slot_bytes(layout.record_bytes)

        def fits(slots: int) -> bool:
            return bool(slots * slot + native.overhead_bytes(layout.rows, slots) <= self.memory_budget)

        slots, step = 0, 1 << (min(self.memory_budget // slot, layout.rows).bit_length())
        while step:
            if slots + step <= layout.rows and fits(slots + step):
                slots += step
            step //= 2
        if writable:
            slots = max(slots, min(_FEWEST_SLOTS, layout.rows))
        memory = huge_pages(max(slots * slot, 1))
        cache = native.RowCache(
            rows=layout.rows,
            record_bytes=layout.record_bytes,
            base=layout.base,
            stride=layout.stride,
            unit=unit_of(layout, self._files),
            version_bytes=layout.version_bytes,
            volumes=len(layout.files),
            chunk=layout.chunk,
            slots=slots,
            memory=memory.data_ptr(),
        )
        return memory, cache

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
        """Of the values."""
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
        """Where its file is: of several, the first."""
        return self._layout.files[0].parent

    @property
    def writable(self) -> bool:
        """Whether rows can be changed by this object."""
        return self._writer is not None

    def __repr__(self) -> str:
        return representation(
            self,
            lambda: path_list(self._layout.files[:1]) + (f" and {more} more" if (more := len(self._layout.files) - 1) else ""),
            lambda: f"shape={self.shape}",
            lambda: f"dtype={self.dtype}",
            lambda: f"memory_budget={size_for_people(self.memory_budget)}",
            lambda: "writable" if self.writable else "",
            lambda: state_text(self._closed),
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
        numbers = checked_ids(ids, self.rows)
        read = RowRead.of_values(numbers, out, self._layout)
        try:
            self._start(read)
            failure = self._finish(read)
        except BaseException:
            self._abandon(read)
            raise
        if errors == "raise":
            if failure is not None:
                raise failure
            return read.delivered()
        positions = torch.tensor(read.native.failed_positions(), dtype=torch.int64)
        return PartialRows(read.delivered(), () if failure is None else failure.failed, positions)

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
        read = RowRead.of_values(numbers, out, self._layout)
        try:
            self._start(read)

            def finish() -> torch.Tensor:
                failure = self._finish(read)
                if failure is not None:
                    raise failure
                return read.delivered()

            assert read.batch is not None
            return RowsFuture(read.batch, finish)
        except BaseException:
            self._abandon(read)
            raise

    def prefetch(self, ids: torch.Tensor) -> None:
        """Start reading rows into memory that will be asked for soon; return at once. A read of the same rows waits for them.

        More rows than the memory budget has room for push one another out. Errors are raised when the rows are read.

        Raises:
            IndexError, TypeError, ValueError: As :meth:`read` does.
        """
        numbers = checked_ids(ids, self.rows)
        with self._lock:
            self._check_usable()
            self._refresh()
            if self._cache.slots:
                self._reader.prefetch(numbers.flatten())
                self._background.wake()

    def pin(self, ids: torch.Tensor) -> int:
        """Have rows stay in memory, such as those known to be used most. Blocks until they are read.

        At most nine tenths of the memory's rows are pinned, in the order of ``ids``: further ones are not. Pinned rows that have
        to be read once more, because another process has committed or after :meth:`rollback`, stay from when they are read.

        Returns:
            How many rows are pinned now.

        Raises:
            IndexError, TypeError, ValueError, OSError: As :meth:`read` does.
        """
        numbers = checked_ids(ids, self.rows).flatten()
        with self._lock:
            self._check_usable()
            self._refresh()
            absent = self._cache.pin(numbers.data_ptr(), numbers.numel(), self._cache.slots * 9 // 10)
            numbers = numbers[torch.tensor(absent, dtype=torch.int64)]
            self._reader.load(numbers)
            return self._cache.pinned

    def unpin(self) -> None:
        """Have no row stay in memory that is seldom used."""
        with self._lock:
            self._check_usable()
            self._cache.unpin_all()

    def _start(self, read: RowRead) -> None:
        with self._lock:
            self._check_usable()
            self._refresh()
            read.generation, read.pid, read.reader = self._generation, self._pid, self._reader
            read.batch = self._reader.batch(read.numbers, read.rows, 0, read.width, read.admit)
            self._reader.start(read.batch)

    def _finish(self, read: RowRead) -> RowsUnreadable | None:
        """Wait for a read that was started. It is made once more if what it has read may be torn, since rows were written
        meanwhile.

        Every read of a reader ends with a look at the manifest: whatever the cache has was read before it, and so while that was
        in force, whose versions no writer touches.
        """
        while True:
            if read.pid == os.getpid():  # or else this is a forked child, which has not what its parent has read
                assert read.batch is not None
                self._reader.finish(read.batch)
                with self._lock:
                    if not self._closed:
                        self._refresh()
                    if read.generation == self._generation and not read.native.stale:
                        return self._reader.failure_of(read.batch)
            self._start(read)

    def _abandon(self, read: RowRead) -> None:
        """Have no rows come to the memory of a read any more, which its caller may use again."""
        if read.batch is not None and read.reader is not None and read.pid == os.getpid():
            read.reader.abandon(read.batch)

    def _refresh(self) -> None:
        """Go on to the writer's last commit, if this is a reader and there is a newer one."""
        if self._manifest is None or not self._manifest.replaced():
            return
        assert self._directories is not None
        newer = ManifestWatch(self._directories[0])
        try:
            epochs = self._newest_epochs()
            # A writer replaces the manifest also before it writes, and to prepare a commit: what was read is as good then.
            committed = (epochs.committed, epochs.abandoned) != (self._epochs.committed, self._epochs.abandoned)
            if committed:
                self._reader.finish_all()
        except BaseException:
            newer.close()
            raise
        with defer_interrupts():
            if committed:
                self._cache.clear()
                self._generation += 1
            self._show(epochs)
            self._manifest.close()
            self._manifest = newer

    def _newest_epochs(self) -> Epochs:
        """Return those of the manifest, which is still this table's. Raises OSError."""
        assert self._directories is not None
        layout, epochs = load_manifest(self._directories[0])
        if replace(layout, files=self._layout.files) != self._layout:
            raise OSError(errno.ESTALE, "the table was replaced by another one", str(self._directories[0]))
        return epochs

    def _show(self, epochs: Epochs) -> None:
        self._epochs = epochs
        self._cache.set_visible(epochs.committed, list(epochs.abandoned))

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
        numbers, last = last_of_each(numbers)

        def fill(begin: int, end: int, records: torch.Tensor) -> None:
            self._layout.values.of(records).copy_(rows[last[begin:end]])

        self._change(numbers, fill, all_columns=len(self._layout.columns) == 1)

    def read_records(self, ids: torch.Tensor, *, keep: bool = True) -> dict[str, torch.Tensor]:
        """Return rows with their states, by name: ``"values"``, and as :attr:`states` has them. Blocks.

        Args:
            ids: Numbers of rows, of one dimension.
            keep: Whether they stay in memory, as far as there is room, since they will be changed. If not, they do like those of
                :meth:`read`: if they are used often enough.

        Raises:
            IndexError, TypeError, ValueError, OSError: As :meth:`read` does.
        """
        numbers = checked_ids(ids, self.rows)
        if numbers.dim() != 1:
            raise ValueError(f"ids must have one dimension, got {numbers.dim()}")
        records = torch.empty(numbers.numel(), self._layout.record_bytes, dtype=torch.uint8)
        self._read_records(numbers, records, keep)
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

        self._change(numbers, fill, all_columns=columns.keys() == known.keys())

    def _read_records(self, numbers: torch.Tensor, records: torch.Tensor, keep: bool = True) -> None:
        read = RowRead(numbers, records, records, self._layout.record_bytes, keep)
        try:
            self._start(read)
            failure = self._finish(read)
        except BaseException:
            self._abandon(read)
            raise
        if failure is not None:
            raise failure

    def _change(self, numbers: torch.Tensor, fill: Callable[[int, int, torch.Tensor], object], all_columns: bool) -> None:
        """Change rows, some at a time: ``fill(begin, end, records)`` puts new values of some numbers into their records, which
        are read before unless it puts all columns there.
        """
        with self._lock:
            writer = self._writer_here()
            step = writer.rows_at_a_time
            for begin in range(0, numbers.numel(), step):
                some = numbers[begin : begin + step].contiguous()
                records = torch.zeros(some.numel(), self._layout.record_bytes, dtype=torch.uint8)
                if not all_columns:
                    self._read_records(some, records)
                fill(begin, begin + some.numel(), records)
                writer.change(some, records)
                self._background.wake()

    @property
    def attributes(self) -> dict[str, Any]:
        """What the last commit has noted besides the rows, such as a number of steps."""
        with self._lock:
            self._check_usable()
            self._refresh()
            return copy.deepcopy(dict(self._epochs.attributes if self._writer is None else self._writer.epochs.attributes))

    def commit(self, attributes: Mapping[str, Any] | None = None) -> int:
        """Make the changes so far the table's last commit, as a whole: after a crash at any time it is that, or the one before.

        Blocks until it is on stable storage. Without changes since the last commit it does nothing.

        Args:
            attributes: What is committed with the rows, for :attr:`attributes`: what JSON can hold. None for what it is now.

        Returns:
            The number of the commit, which grows.

        Raises:
            PermissionError: If the table was not opened ``writable``.
            OSError: From the drive, such as ENOSPC. The last commit is the one before then; the changes are still there, and
                commit() may be called again. After a flush that failed they may be lost, and each commit() raises its error
                until :meth:`rollback`.
        """
        with self._lock:
            return self._writer_here().commit(attributes)

    def prepare_commit(self, name: str, attributes: Mapping[str, Any]) -> None:
        """Make the first half of a commit of several tables: see :class:`~deepnvme.tables.common_commits.CommonCommits`. Blocks.

        Args:
            name: Of the commit: the same for all tables, and for no other commit.
            attributes: As for :meth:`commit`.

        Raises:
            PermissionError, OSError: As :meth:`commit` does. The last commit is the one before.
        """
        with self._lock:
            self._writer_here().prepare(name, attributes)

    def commit_prepared(self, name: str, attributes: Mapping[str, Any]) -> None:
        """Make the second half, of a commit that this object has prepared or begun to commit. Blocks. Arguments and errors are
        those of the first.
        """
        with self._lock:
            self._writer_here().commit(attributes, name)

    @property
    def commit_name(self) -> str:
        """Name of the last commit, if it was made of several tables; else empty."""
        with self._lock:
            return self._writer_here().epochs.name

    def adopt_prepared(self, names: Collection[str]) -> bool:
        """Make a commit the last one that the writer before had prepared and not committed, if it has one of these names. Blocks.

        Returns:
            Whether there was one. Rows may have other values then.

        Raises:
            PermissionError, OSError: As :meth:`commit` does.
        """
        with self._lock:
            writer = self._writer_here()
            if writer.prepared is None or writer.prepared.name not in names:
                return False
            self._reader.finish_all()
            writer.adopt_prepared()
            return True

    def rollback(self) -> None:
        """Undo the changes since the last commit. Raises PermissionError and OSError; call it again after the latter."""
        with self._lock:
            writer = self._writer_here()
            self._reader.finish_all()
            writer.rollback()

    def _writer_here(self) -> RowWriter:
        """Return the writer. Called with the lock held. Raises ValueError and PermissionError."""
        self._check_usable()
        if self._writer is None:
            text = f"the table '{self._layout.files[0].parent}' was opened to be read: open it with writable=True"
            raise PermissionError(text)
        return self._writer

    # -- the end, and other processes

    def stats(self) -> TableStats:
        """Return what the table has done since it was opened in this process."""
        with self._lock:
            reader, writer, cache = self._reader, self._writer, self._cache
            return TableStats(
                hits=reader.hits,
                misses=reader.misses,
                rows_read=reader.rows_read,
                rows_written=0 if writer is None else writer.rows_written,
                bytes_read=reader.bytes_read,
                bytes_written=0 if writer is None else writer.bytes_written,
                commits=0 if writer is None else writer.commits,
                cached_rows=cache.used,
                cache_capacity=cache.slots,
                changed_rows=cache.changed + cache.writing,
                pinned_rows=cache.pinned,
            )

    def _check_usable(self) -> None:
        """Open the table again in a forked child. Raises ValueError after :meth:`close`."""
        if self._closed:
            raise ValueError("the table is closed")
        if os.getpid() != self._pid:
            if self._at_collection is not None:
                self._at_collection.detach()
            self._writer, self._locks, self._manifest = None, [], None
            epochs = Epochs() if self._directories is None else self._newest_epochs()
            self._open(epochs, writable=False)

    def close(self) -> None:
        """Close the files. What was changed and not committed is lost. Idempotent.

        Raises:
            OSError: From the drive. The table is closed nevertheless.
        """
        with self._lock:
            if self._closed:
                return
            try:
                self._background.stop()
                if os.getpid() == self._pid:
                    self._reader.finish_all()
                    if self._writer is not None:
                        self._writer.close()
            finally:
                self._release()

    def _release(self) -> None:
        with defer_interrupts():
            self._closed = True
            if os.getpid() != self._pid:
                return
            if self._at_collection is not None:
                self._at_collection.detach()
            with contextlib.ExitStack() as stack:  # all of it, whatever fails
                for lock in self._locks:
                    stack.callback(lock.release)
                if self._manifest is not None:
                    stack.callback(self._manifest.close)
                stack.callback(self._engine.close)
                for file in self._files:
                    stack.callback(file.close)

    def __enter__(self) -> Table:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return _opened_again, (self._source, self.memory_budget, self.staging_bytes, self._config)


def _opened_again(source: dict[str, Any], memory_budget: int, staging_bytes: int, config: AioConfig | None) -> Table:
    source = dict(source)
    paths, name = source.pop("paths"), source.pop("name")
    return Table.open(paths, name, **source, memory_budget=memory_budget, staging_bytes=staging_bytes, config=config)


_opened: weakref.WeakSet[Table] = weakref.WeakSet()


def _renew_locks() -> None:
    """Have tables usable in a child that was forked while another thread had their locks: it is not there to release them."""
    for table in _opened:
        table._lock = threading.RLock()


os.register_at_fork(after_in_child=_renew_locks)


def _release_collected(
    pid: int, lock: threading.RLock, background: BackgroundThread, writer: RowWriter | None, locks: list[DirectoryLock]
) -> None:
    """Have another writer have the table, of one that was collected without being closed, once nothing is being written."""
    if os.getpid() != pid:
        return
    with defer_interrupts(), lock:  # the table is gone: only its thread may have the lock, or be the one that runs this
        background.stop()
        if writer is not None:
            writer.finish_writes()
        for each in locks:
            with contextlib.suppress(OSError):
                each.release()


def _require(tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, name: str) -> None:
    """Raise ValueError for another shape or dtype."""
    if tensor.dtype != dtype or tuple(tensor.shape) != shape:
        raise ValueError(f"{name} must have the shape {shape} in {dtype}, got {tuple(tensor.shape)} in {tensor.dtype}")
