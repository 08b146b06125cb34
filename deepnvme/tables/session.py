"""A session: the open files of a table in one process, with the rows that are in memory.

1. The rows of an updatable table are locked: by one writer, or by any number of readers.
2. A forked child shares only the layout with its parent: it opens the files again, as a reader.
3. All methods but :meth:`close` must be called with ``lock`` held.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import threading
import weakref
from bisect import bisect_right
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from deepnvme._interrupts import defer_interrupts
from deepnvme.drives.aio_config import AioConfig
from deepnvme.drives.profiles import engine_for
from deepnvme.engine import Engine, File
from deepnvme.files.directory_lock import DirectoryLock, DirectoryOwner, close_in_children, unlock_and_close
from deepnvme.files.regular_files import open_without_waiting
from deepnvme.memory.host import huge_pages
from deepnvme.ops import load_async_io
from deepnvme.store.data_file import lock_data_file
from deepnvme.telemetry.report_figures import ReportFigures

from .creating import file_bytes
from .layout import TableLayout
from .manifest import NO_COMMITS, CorruptTable, Epochs, load_manifest
from .reading import RowReader, unit_of
from .writing import RowWriter

if TYPE_CHECKING:
    from deepnvme.memory.lease import Transfer
    from deepnvme.ops.aio.async_io_op.tables import RowCache

_WAIT_SECONDS = 0.005
"""Seconds that the thread waits for one transfer before it checks the other reads and writes in flight."""
_FEWEST_SLOTS = 64
"""Least number of rows for which a writer has memory, whatever the budget."""
_LOCKED_REMEDY = "commit() what is to be kept, and call its close() (an embedding has it as .table)"
"""Advice in the error if a second writer is opened: what to do with the first one."""


@dataclass(frozen=True)
class TableStats(ReportFigures):
    """Counters of a table since it was opened. ``as_dict()`` returns them as a dictionary."""

    hits: int
    """Row numbers that were found in memory."""
    misses: int
    """Row numbers that were not found in memory."""
    rows_read: int
    """Rows read from the drive. A row that occurs several times in a call counts once."""
    rows_written: int
    """Rows written to the drive."""
    bytes_read: int
    """Bytes read from the drive: whole sectors, with the gaps between rows that are read together."""
    bytes_written: int
    """Bytes written to the drive."""
    commits: int
    """Number of commits."""
    cached_rows: int
    """Rows in memory now."""
    cache_capacity: int
    """Rows that fit into memory."""
    changed_rows: int
    """Rows that are changed in memory, and not written yet."""

    @property
    def hit_rate(self) -> float:
        """Share of the row numbers that were found in memory, 0 to 1; 0 before the first read."""
        return self.hits / max(self.hits + self.misses, 1)


class BackgroundThread:
    """Copies prefetched rows to the cache once they are read, starts further prefetch reads, and writes changed rows.

    The thread runs only while there is work. It waits for the drive without holding the table's lock. It has references to
    the table's reader and writer, but not to the table. It is a daemon thread: the interpreter does not wait for it at exit.

    Args:
        lock: The table's lock.
        reader: Starts and finishes prefetches.
        writer: Writes changed rows; None for a read-only table.
    """

    def __init__(self, lock: threading.RLock, reader: RowReader, writer: RowWriter | None) -> None:
        self._lock, self._reader, self._writer = lock, reader, writer
        self._thread: threading.Thread | None = None
        self._stopped = False

    def wake(self) -> None:
        """Start the thread if there is something to do. Never blocks. Called with the lock held."""
        if self._stopped or (self._thread is not None and self._thread.is_alive()):
            return
        if not self._reader.prefetching and (self._writer is None or not self._writer.writing_behind):
            return
        with defer_interrupts():
            self._thread = threading.Thread(target=self._run, name="deepnvme table", daemon=True)
            # Without a thread, everything goes on with the next call of the table.
            with contextlib.suppress(RuntimeError):
                self._thread.start()

    def stop(self) -> None:
        """Tell the thread to start nothing more, and to end. Returns at once. Called with the lock held."""
        self._stopped = True

    def _run(self) -> None:
        while True:
            with self._lock:
                future: Transfer | None = None if self._stopped else self._reader.next_prefetched()
                if future is None and self._writer is not None and not self._stopped:
                    future = self._writer.next_written()
                elif self._writer is not None and not self._stopped:
                    self._writer.write_behind()
                if future is None:
                    self._thread = None  # the lock is held: the next wake() starts another thread
                    return
            with contextlib.suppress(TimeoutError):
                future.exception(_WAIT_SECONDS)
            del future


class TableSession:
    """The open files of a table in one process: opens them, reopens them in a forked child, and closes them.

    Args:
        layout: Where the rows are.
        directories: The table's directories; empty for files that are used as a table in place, which have no manifest.
        writable: Whether rows will be changed.
        memory_budget: Bytes of memory for rows.
        staging_bytes: Bytes of pinned memory through which rows are read and written.
        aio_config: Settings of the engine; None for the profile of the drive.

    Raises:
        The errors of :meth:`Table.open`.
    """

    def __init__(
        self, layout: TableLayout, directories: list[Path], writable: bool, memory_budget: int, staging_bytes: int,
        aio_config: AioConfig | None,
    ) -> None:  # fmt: skip
        self.layout, self._directories, self._config = layout, directories, aio_config
        self.memory_budget, self.staging_bytes = memory_budget, staging_bytes
        self.lock = threading.RLock()
        """The table's lock. Callers hold it while they call methods of the session, its reader or its writer."""
        self._at_collection: weakref.finalize[Any, TableSession] | None = None
        self._open(writable)
        _sessions.add(self)

    def _open(self, writable: bool) -> None:
        """Open the files, with an empty cache. Closes them if that fails."""
        layout = self.layout
        self._pid = os.getpid()
        self.closed = False
        self.writer: RowWriter | None = None
        self._locks = contextlib.ExitStack()
        self._files: list[File] = []
        self._engine: Engine = engine_for(layout.files, self._config)
        try:
            self._epochs = self._lock_rows(writable) if self._directories else NO_COMMITS
            for path in layout.files:
                self._files.append(self._engine.open(path, "r+" if writable else "r", whole_sectors=True))
            self._check_files(writable)
            self._memory, self.cache = self._new_cache(writable)
            self.cache.set_visible(self._epochs.committed, list(self._epochs.abandoned))
            self.reader = RowReader(self._engine, self._files, layout, self.cache, self.lock, self.staging_bytes * 2 // 3)
            if writable:
                self.writer = RowWriter(
                    self._engine, self._files, layout, self.cache, self.reader, self._epochs.begin(), self.staging_bytes // 3
                )
            self.background = BackgroundThread(self.lock, self.reader, self.writer)
            self._at_collection = weakref.finalize(
                self, _release_collected, self._pid, self.lock, self.background, self.writer, self._locks
            )
        except BaseException:
            self._release()
            self.closed, self._pid = False, 0  # a forked child tries again when it uses the table again
            raise

    def _lock_rows(self, writable: bool) -> Epochs:
        """Lock the rows of a table, unless the table can never be changed, and return the epochs of the last commit."""
        owner = DirectoryOwner("Table", _LOCKED_REMEDY)
        for path in self.layout.files if self.layout.updatable else ():
            if writable:  # which also tells others who the writer is
                self._locks.callback(DirectoryLock(path.parent, owner).release)
            file = io.FileIO(str(path), "r+" if writable else "r", opener=open_without_waiting)
            self._locks.callback(unlock_and_close, file, path)
            close_in_children(file)
            lock_data_file(file, owner, read_only=not writable, path=path)
        layout, epochs = load_manifest(self._directories)  # nobody replaces it from now on
        if layout != self.layout:
            raise OSError(errno.ESTALE, "the table was replaced by another one", str(self._directories[0]))
        return epochs

    def _check_files(self, writable: bool) -> None:
        """Check sizes, and raise CorruptTable or ValueError.

        CorruptTable: a file is too short or too long, or a row does not fit into a version. ValueError: for a
        writer, the bytes of a version are not a multiple of the drive's sector size.
        """
        layout = self.layout
        version = layout.version_bytes
        if layout.updatable and version < load_async_io().tables.VERSION_HEADER_BYTES + layout.record_bytes:
            raise CorruptTable(layout.files[0], f"a row does not fit into the {version} bytes of a version")
        for volume, (path, file) in enumerate(zip(layout.files, self._files, strict=True)):
            size, wanted = file.size(), layout.bytes_in(volume)
            if size < wanted or (self._directories and size != file_bytes(layout, volume)):
                raise CorruptTable(path, f"it has {size} bytes, and {layout.rows_in(volume)} rows need {wanted}")
            if writable and version % file.sector_size:
                raise ValueError(
                    f"'{path}' is on a drive with sectors of {file.sector_size} bytes, and versions of rows have"
                    f" {version}: make a copy by Table.create"
                )

    def _new_cache(self, writable: bool) -> tuple[torch.Tensor, RowCache]:
        """Return the memory of a row cache within the budget, and the cache. csrc/tables/row_cache.cpp evicts rows."""
        native, layout = load_async_io().tables, self.layout
        slot = native.slot_bytes(layout.record_bytes)
        counts = range(1, layout.rows + 1)
        slots = bisect_right(
            counts, self.memory_budget, key=lambda count: count * slot + native.overhead_bytes(layout.rows, count)
        )
        if writable:
            slots = max(slots, min(_FEWEST_SLOTS, layout.rows))
        memory, shards = huge_pages(max(slots * slot, 1)), layout.shards
        striped = layout.chunk > 0 or len(shards) == 1
        places = [(each.first_row, each.base, volume) for each, volume in zip(shards, layout.volumes, strict=True)]
        cache = native.RowCache(
            rows=layout.rows, record_bytes=layout.record_bytes, base=shards[0].base, stride=layout.stride,
            unit=unit_of(layout, self._files), version_bytes=layout.version_bytes, volumes=len(self._files),
            chunk=max(layout.chunk, 1), shards=[] if striped else places,
            slots=slots, memory=memory.data_ptr(),
        )  # fmt: skip
        return memory, cache

    def reader_here(self) -> RowReader:
        """Return this process's reader. In a forked child, opens the files again first.

        Raises:
            ValueError: After :meth:`close`.
            OSError: If the drive cannot be read or written.
        """
        self._check_usable()
        return self.reader

    def writer_here(self) -> RowWriter:
        """Return the writer. Raises ValueError after :meth:`close`, and PermissionError if the table was opened read-only."""
        self._check_usable()
        if self.writer is None:
            place = self._directories[0] if self._directories else self.layout.files[0]
            if not self._directories:
                why = "a file used in place is only read; copy its rows by Table.from_tensor(..., updatable=True)"
            elif self.layout.updatable:
                why = "the table was opened to be read; open it with writable=True"
            else:
                why = "the table was made without updatable=True; make it again by Table.from_tensor(..., updatable=True)"
            raise PermissionError(f"the rows of '{place}' cannot be changed: {why}")
        return self.writer

    @property
    def epochs(self) -> Epochs:
        """The epochs of the last commit."""
        self._check_usable()
        return self._epochs if self.writer is None else self.writer.epochs

    def stats(self) -> TableStats:
        """Return the counters since the files were opened in this process."""
        reader, writer, cache = self.reader, self.writer, self.cache
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
        )

    def _check_usable(self) -> None:
        """Open the files again in a forked child. Raises ValueError after :meth:`close`."""
        if self.closed:
            raise ValueError("the table is closed")
        if os.getpid() != self._pid:
            if self._at_collection is not None:
                self._at_collection.detach()
            self._open(writable=False)

    def close(self) -> None:
        """Close the files, whatever fails. Uncommitted changes are lost. Idempotent. Raises OSError."""
        with self.lock:
            if self.closed:
                return
            try:
                self.background.stop()
                if os.getpid() == self._pid:
                    self.reader.finish_all()
                    if self.writer is not None:
                        self.writer.close()
            finally:
                self._release()

    def _release(self) -> None:
        with defer_interrupts():
            self.closed = True
            if os.getpid() != self._pid:
                return
            if self._at_collection is not None:
                self._at_collection.detach()
            with self._locks as stack:
                stack.callback(self._engine.close)
                for file in self._files:
                    stack.callback(file.close)


_sessions: weakref.WeakSet[TableSession] = weakref.WeakSet()


def _renew_locks() -> None:
    """Replace the locks in a forked child: a lock that another thread of the parent held would never be released there."""
    for session in _sessions:
        session.lock = threading.RLock()


os.register_at_fork(after_in_child=_renew_locks)


def _release_collected(
    pid: int, lock: threading.RLock, background: BackgroundThread, writer: RowWriter | None, locks: contextlib.ExitStack
) -> None:
    """Unlock the directories of a session that was collected without being closed, once no write is under way."""
    if os.getpid() != pid:
        return
    with defer_interrupts(), lock:  # the session is gone: only its thread may have the lock, or be the one that runs this
        background.stop()
        if writer is not None:
            writer.finish_writes()
        with contextlib.suppress(OSError):
            locks.close()
