"""A session: the open files of a table in one process, with the rows that are in memory.

1. A directory has one writer at a time, which holds its lock. Any number of readers open the files too, without a lock.
2. A reader shows one commit. It changes to a later one only in :meth:`TableSession.refresh`, which empties the cache first.
3. A writer never overwrites a version of the last commit. So rows that a reader has read are valid if the manifest was not
   replaced before the read ended; otherwise the rows are read once more.
4. A forked child shares only the layout with its parent: it opens the files again, as a reader.
5. All methods but :meth:`close` must be called with ``lock`` held.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import weakref
from bisect import bisect_right
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from deepnvme._interrupts import defer_interrupts
from deepnvme.drives.aio_config import AioConfig
from deepnvme.drives.profiles import engine_for
from deepnvme.engine import Engine, File
from deepnvme.files.directory_lock import DirectoryLock, DirectoryOwner
from deepnvme.memory.host import huge_pages
from deepnvme.ops import load_async_io
from deepnvme.telemetry.report_figures import ReportFigures

from .background import BackgroundThread
from .identity import LARGEST_SECTOR, check_identity, file_bytes
from .layout import TableLayout
from .manifest import NO_COMMITS, CorruptTable, Epochs, ManifestWatch, load_manifest
from .reading import RowReader, unit_of
from .writing import RowWriter

if TYPE_CHECKING:
    from deepnvme.ops.aio.async_io_op.tables import RowCache

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
    pinned_rows: int
    """Rows that :meth:`Table.pin` keeps in memory."""

    @property
    def hit_rate(self) -> float:
        """Share of the row numbers that were found in memory, 0 to 1; 0 before the first read."""
        return self.hits / max(self.hits + self.misses, 1)


class TableSession:
    """The open files of a table in one process: opens them, reopens them in a forked child, and closes them.

    Args:
        layout: Where the rows are.
        directories: The table's directories; None for a file that is used as a table in place, which has no manifest.
        epochs: Epochs from the manifest.
        writable: Whether rows will be changed.
        memory_budget: Bytes of memory for rows.
        staging_bytes: Bytes of pinned memory through which rows are read and written.
        config: Settings of the engine; None for the profile of the drive.

    Raises:
        The errors of :meth:`Table.open`.
    """

    def __init__(
        self, layout: TableLayout, directories: list[Path] | None, epochs: Epochs, writable: bool, memory_budget: int,
        staging_bytes: int, config: AioConfig | None,
    ) -> None:  # fmt: skip
        self.layout, self._directories, self._config = layout, directories, config
        self.memory_budget, self.staging_bytes = memory_budget, staging_bytes
        self.lock = threading.RLock()
        """The table's lock. Callers hold it while they call methods of the session, its reader or its writer."""
        self.generation = 0
        """Number of times that a reader has changed to a later commit of the writer."""
        self.writer: RowWriter | None = None
        self._inodes: list[tuple[int, int]] = []
        self._locks: list[DirectoryLock] = []
        self._manifest: ManifestWatch | None = None
        self._at_collection: weakref.finalize[Any, TableSession] | None = None
        self._open(epochs, writable)
        _sessions.add(self)

    def _open(self, epochs: Epochs, writable: bool) -> None:
        """Open the files, with an empty cache. Closes them if that fails."""
        layout, directories = self.layout, self._directories
        self._pid = os.getpid()
        self.closed = False
        self._files: list[File] = []
        self._engine: Engine = engine_for(layout.files, self._config)
        try:
            if directories is not None and writable:
                owner = DirectoryOwner("Table", _LOCKED_REMEDY)
                for directory in directories:
                    self._locks.append(DirectoryLock(directory, owner))
                _, epochs = load_manifest(directories[0])  # the writer before may have committed meanwhile
                epochs = epochs.begin()
            elif directories is not None and layout.updatable:
                self._manifest = ManifestWatch(directories[0])
                epochs = self._newest_epochs()  # the writer may have committed meanwhile
            for path in layout.files:
                self._files.append(self._engine.open(path, "r+" if writable else "r", whole_sectors=True))
            self._inodes = [_inode(path) for path in layout.files]
            if directories is not None:
                epochs = self._check_identity(epochs)
            self._check_files(writable)
            self._memory, self.cache = self._new_cache(writable)
            self._show(epochs)
            self.reader = RowReader(self._engine, self._files, layout, self.cache, self.lock, self.staging_bytes * 2 // 3)
            if directories is not None and writable:
                self.writer = RowWriter(
                    self._engine, self._files, layout, self.cache, self.reader, directories, epochs, self.staging_bytes // 3
                )
            self.background = BackgroundThread(self.lock, self.reader, self.writer)
            self._at_collection = weakref.finalize(
                self, _release_collected, self._pid, self.lock, self.background, self.writer, list(self._locks)
            )
        except BaseException:
            self._release()
            raise

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
            if size < wanted or (self._directories is not None and size > file_bytes(layout, volume) + LARGEST_SECTOR):
                raise CorruptTable(path, f"it has {size} bytes, and {layout.rows_in(volume)} rows need {wanted}")
            if writable and version % file.sector_size:
                raise ValueError(
                    f"'{path}' is on a drive with sectors of {file.sector_size} bytes, and versions of rows have"
                    f" {version}: make a copy by Table.create"
                )

    def _check_identity(self, epochs: Epochs) -> Epochs:
        """Check that the files belong to the manifest's table, and return the manifest's epochs.

        If a writer has replaced the manifest meanwhile, the new one is read and checked. Raises ValueError if the files belong
        to another table.
        """
        while True:
            try:
                check_identity(self.layout, epochs)
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
        """Return the memory of a row cache within the budget, and the cache. csrc/tables/row_cache.cpp evicts rows."""
        native, layout = load_async_io().tables, self.layout
        slot = native.slot_bytes(layout.record_bytes)
        counts = range(1, layout.rows + 1)
        slots = bisect_right(
            counts, self.memory_budget, key=lambda count: count * slot + native.overhead_bytes(layout.rows, count)
        )
        if writable:
            slots = max(slots, min(_FEWEST_SLOTS, layout.rows))
        memory = huge_pages(max(slots * slot, 1))
        cache = native.RowCache(
            rows=layout.rows, record_bytes=layout.record_bytes, base=layout.base, stride=layout.stride,
            unit=unit_of(layout, self._files), version_bytes=layout.version_bytes, volumes=len(layout.files), chunk=layout.chunk,
            shards=list(layout.shards), slots=slots, memory=memory.data_ptr(),
        )  # fmt: skip
        return memory, cache

    def reader_here(self) -> RowReader:
        """Return this process's reader, at the writer's last commit. In a forked child, opens the files again first.

        Raises:
            ValueError: After :meth:`close`.
            OSError: From the drive.
        """
        self._check_usable()
        self.refresh()
        return self.reader

    def writer_here(self) -> RowWriter:
        """Return the writer. Raises ValueError after :meth:`close`, and PermissionError if the table was opened to be read."""
        self._check_usable()
        if self.writer is None:
            text = f"the table '{self.layout.files[0].parent}' was opened to be read: open it with writable=True"
            raise PermissionError(text)
        return self.writer

    @property
    def epochs(self) -> Epochs:
        """The epochs of the commit that this session reads; for a writer, of its last commit."""
        self._check_usable()
        self.refresh()
        return self._epochs if self.writer is None else self.writer.epochs

    def refresh(self) -> None:
        """Change to the writer's last commit, if this is a reader and there is a newer commit. Raises OSError."""
        if self._manifest is None or not self._manifest.replaced():
            return
        assert self._directories is not None
        newer = ManifestWatch(self._directories[0])
        try:
            epochs = self._newest_epochs()
            # A writer replaces the manifest also before its first write, and to prepare a commit: rows stay valid then.
            committed = (epochs.committed, epochs.abandoned) != (self._epochs.committed, self._epochs.abandoned)
            if committed:
                self.reader.finish_all()
        except BaseException:
            newer.close()
            raise
        with defer_interrupts():
            if committed:
                self.cache.clear()
                self.generation += 1
            self._show(epochs)
            self._manifest.close()
            self._manifest = newer

    def _newest_epochs(self) -> Epochs:
        """Return the epochs in the current manifest. Raises OSError (ESTALE) if the table was replaced by another one."""
        assert self._directories is not None
        layout, epochs = load_manifest(self._directories[0])
        # A table that was made again, or restored from a backup, may have the same layout, and has other files.
        inodes = [_inode(path) for path in self.layout.files] if self._files else self._inodes
        if replace(layout, files=self.layout.files) != self.layout or inodes != self._inodes:
            raise OSError(errno.ESTALE, "the table was replaced by another one", str(self._directories[0]))
        return epochs

    def _show(self, epochs: Epochs) -> None:
        self._epochs = epochs
        self.cache.set_visible(epochs.committed, list(epochs.abandoned))

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
            pinned_rows=cache.pinned,
        )

    def _check_usable(self) -> None:
        """Open the files again in a forked child. Raises ValueError after :meth:`close`."""
        if self.closed:
            raise ValueError("the table is closed")
        if os.getpid() != self._pid:
            if self._at_collection is not None:
                self._at_collection.detach()
            self.writer, self._locks, self._manifest = None, [], None
            self._open(NO_COMMITS if self._directories is None else self._newest_epochs(), writable=False)

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
            with contextlib.ExitStack() as stack:
                for lock in self._locks:
                    stack.callback(lock.release)
                if self._manifest is not None:
                    stack.callback(self._manifest.close)
                stack.callback(self._engine.close)
                for file in self._files:
                    stack.callback(file.close)


def _inode(path: Path) -> tuple[int, int]:
    """Return what identifies the file at a path: device and inode. Raises OSError."""
    found = path.stat()
    return found.st_dev, found.st_ino


_sessions: weakref.WeakSet[TableSession] = weakref.WeakSet()


def _renew_locks() -> None:
    """Replace the locks in a forked child: nobody there would release a lock that another thread of the parent held."""
    for session in _sessions:
        session.lock = threading.RLock()


os.register_at_fork(after_in_child=_renew_locks)


def _release_collected(
    pid: int, lock: threading.RLock, background: BackgroundThread, writer: RowWriter | None, locks: list[DirectoryLock]
) -> None:
    """Unlock the directories of a session that was collected without being closed, once no write is under way."""
    if os.getpid() != pid:
        return
    with defer_interrupts(), lock:  # the session is gone: only its thread may have the lock, or be the one that runs this
        background.stop()
        if writer is not None:
            writer.finish_writes()
        for each in locks:
            with contextlib.suppress(OSError):
                each.release()
