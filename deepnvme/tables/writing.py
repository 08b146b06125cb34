"""Changes of a table's rows: kept in memory, written to the drive in the background, and committed together."""

from __future__ import annotations

import copy
import uuid
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from deepnvme._interrupts import defer_interrupts
from deepnvme.engine import Engine, File
from deepnvme.files.identity import join
from deepnvme.ops import load_async_io
from deepnvme.transfer.gather import Transfers

from .layout import TableLayout
from .manifest import MEMBERSHIP_NAME, Epochs, Prepared, save_manifest
from .reading import RowReader, StagingPool, int64_at

if TYPE_CHECKING:
    from deepnvme.ops.aio.async_io_op.tables import RowCache, WriteBatch

_RESERVED_EPOCHS = 1 << 16
"""Number of epochs, one per commit, that are reserved by one write of the manifest. After a crash, unused ones are abandoned."""


@dataclass(eq=False)
class _Write:
    """One part of changed rows that is being written to the drive."""

    native: WriteBatch
    staging: torch.Tensor
    futures: Transfers
    incomplete: bool = False
    """Whether the engine refused to start some of the writes."""


class RowWriter:
    """Changes rows of one table, and commits the changes atomically. Its methods must be called with the table's lock held.

    A changed row stays in memory until it is written. Writing begins when a quarter of the cache is changed. Each row has two
    versions on the drive, so that the last commit stays intact meanwhile: see :mod:`deepnvme.tables.manifest` for the
    invariants.

    Args:
        engine: Writes the files.
        files: The layout's files, open for reading and writing.
        layout: Where the rows are.
        cache: The rows that are in memory.
        reader: Reads rows that are not in memory.
        epochs: Epochs from the manifest, as :meth:`Epochs.begin` returns them for a new writer.
        staging_bytes: Bytes of memory for rows that are being written.
    """

    def __init__(
        self, engine: Engine, files: Sequence[File], layout: TableLayout, cache: RowCache, reader: RowReader, epochs: Epochs,
        staging_bytes: int,
    ) -> None:  # fmt: skip
        self._engine, self._files, self._layout, self._cache, self._reader = engine, files, layout, cache, reader
        self.epochs = replace(epochs, prepared=None)
        self.prepared = epochs.prepared
        """The commit of several tables that the previous writer prepared; None without one, or once a row was changed."""
        self._written_in_epoch = False
        self._identity = uuid.uuid4().hex  # of a table in several directories, from the first write on
        self._identity_is_own = len(files) == 1
        self._manifest_uncertain = False  # a commit failed or was interrupted, and may be in force nevertheless
        self._flush_error: BaseException | None = None
        self._flushed = False  # nothing was changed since the last flush
        self._staging = StagingPool(engine, staging_bytes, layout.version_bytes, layout.version_bytes)
        self._rows_per_part = self._staging.part_bytes // layout.version_bytes
        self._under_way: deque[_Write] = deque()
        self._error: BaseException | None = None
        self.commits = self.bytes_written = self.rows_written = 0
        self._show()

    def _show(self) -> None:
        self._cache.set_visible(self.epochs.present, list(self.epochs.abandoned))

    @property
    def rows_at_a_time(self) -> int:
        """Most rows that one call of :meth:`change` takes: a quarter of the cache."""
        return max(self._cache.slots // 4, 1)

    def change(self, rows: torch.Tensor, records: torch.Tensor) -> None:
        """Replace the records of rows in the cache. Blocks while the cache is full of changed rows.

        Args:
            rows: Row numbers, int64, contiguous, each once; at most :attr:`rows_at_a_time`.
            records: New records: uint8 of shape (rows, bytes of a record), contiguous.

        Raises:
            OSError: If the drive cannot be read or written. Some rows may have been changed then.
        """
        self.prepared = None
        self._flushed = False
        self._make_room(len(rows))
        epoch = self.epochs.present
        while absent := self._cache.change(rows.data_ptr(), len(rows), records.data_ptr(), epoch):
            # The drive says which version of them is the last committed one.
            rows, records = rows[absent].contiguous(), records[absent].contiguous()
            self._reader.load(rows)
        self.write_behind()

    @property
    def writing_behind(self) -> bool:
        """Whether the background thread has changed rows to write, or writes to wait for."""
        return bool(self._under_way) or self._above_dirty_threshold()

    def _above_dirty_threshold(self) -> bool:
        """Return whether to write behind: at least a quarter of the cache is changed.

        False after an error, until a change or commit has raised it, so that a failing drive is not tried again and again.
        """
        return self._error is None and self._cache.changed > 0 and self._cache.changed >= self._cache.slots // 4

    def write_behind(self) -> None:
        """Start writing if at least a quarter of the cache is changed, as far as there is staging memory.

        Does not wait for writes of rows. The next change or commit raises errors.
        """
        try:
            self._collect()
            if self._above_dirty_threshold():
                self._write_some()
        except OSError as error:
            self._error = error

    def next_written(self) -> Transfers | None:
        """Start further writes if at least a quarter of the cache is changed. Does not wait for writes of rows.

        Returns:
            The write to wait for before the next call; None if none is in flight.
        """
        self.write_behind()
        return self._under_way[0].futures if self._under_way else None

    def _make_room(self, rows: int) -> None:
        """Wait until the cache has room for this number of changed rows."""
        most = self._cache.slots - rows
        while self._cache.changed + self._cache.writing > most:
            if not self._write_some(1):
                if not self._under_way:
                    break
                self._finish_oldest()
            self._raise_error()

    def _write_some(self, parts: int | None = None) -> int:
        """Start writing changed rows, as far as there is staging memory. Returns the number of parts that were started.

        Does not block, except for the first write of an epoch, which may have to replace the manifest.
        """
        self._collect()
        begun = 0
        while self._cache.changed and (parts is None or begun < parts):
            if not self._staging.free:
                break
            self._begin_epoch()
            if not self._write_part():
                break
            begun += 1
        return begun

    def _begin_epoch(self) -> None:
        """Reserve the present epoch in the manifest before its first version is written. Blocks.

        Before this writer's first version, also give a table in several directories a new identity.
        """
        reserving = self.epochs
        if reserving.present > reserving.reserved:
            reserving = replace(reserving, reserved=reserving.present + _RESERVED_EPOCHS)
        directories = [path.parent for path in self._layout.files]
        if not self._identity_is_own:
            reserving = replace(reserving, identity=self._identity)
            join(directories, MEMBERSHIP_NAME, self._identity, self.epochs.identity)
        if reserving is not self.epochs or self._manifest_uncertain:
            save_manifest(self._layout, reserving)
            with defer_interrupts():
                self.epochs = reserving
                self._manifest_uncertain = False
        if not self._identity_is_own:
            join(directories, MEMBERSHIP_NAME, self._identity)
            self._identity_is_own = True
        self._written_in_epoch = True

    def _write_part(self) -> bool:
        """Start writing one part. Returns False if all changed rows are already being written."""
        size = self._layout.version_bytes
        with defer_interrupts():
            staging = self._staging.take()
            native = load_async_io().tables.WriteBatch(self._cache, self._rows_per_part, staging.data_ptr())
            if not native.rows:
                self._staging.give_back(staging)
                return False
            write = _Write(native, staging, Transfers())
            self._under_way.append(write)
            begin = 0
            try:
                for volume, address, count in native.parts:
                    versions = write.staging[begin * size : (begin + count) * size].view(count, size)
                    write.futures.start(self._engine.scatter, self._files[volume], int64_at(address, count), versions)
                    begin += count
            except BaseException as error:
                write.incomplete = True
                if not isinstance(error, OSError):
                    raise
                self._error = error
                return True
        self.bytes_written += native.rows * size
        self.rows_written += native.rows
        return True

    def _collect(self) -> None:
        """Record the results of completed writes and release their memory, without waiting."""
        while self._under_way and self._under_way[0].futures.done():
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        """Wait for the oldest write, and record its result. A wait that is interrupted leaves the write in the queue."""
        write = self._under_way[0]
        error = write.futures.exception()
        with defer_interrupts():
            if error is not None:
                self._error = error
            write.native.written(error is None and not write.incomplete)
            self._under_way.popleft()
            self._staging.give_back(write.staging)

    def _raise_error(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def flush(self) -> None:
        """Write all changed rows to stable storage. Blocks. Raises OSError; rows that were not written stay marked as changed."""
        if self._flush_error is not None:
            raise self._flush_error
        if self._flushed:
            return
        self.finish_writes()
        self._error = None  # rows that could not be written are still changed, and are written again now
        while self._cache.changed or self._under_way:
            self._write_some()
            if self._under_way:
                self._finish_oldest()
            self._raise_error()
        if self._written_in_epoch:
            error = Transfers(map(self._engine.fsync, self._files)).exception()
            if error is not None:
                # The system may have dropped what it could not write, and a second flush would not tell.
                self._flush_error = error
                raise error
        self._flushed = True

    def prepare(self, name: str, attributes: Mapping[str, Any]) -> None:
        """Flush all changes, and record in the manifest that this table is ready for a commit of several tables. Blocks.

        :meth:`commit` then only has to replace the manifest. After a crash, the next writer finds the commit in :attr:`prepared`.

        Raises:
            OSError: As :meth:`commit` does.
        """
        self.flush()
        prepared = Prepared(epoch=self.epochs.present, name=name, attributes=dict(attributes))
        self._manifest_uncertain = True
        save_manifest(self._layout, replace(self.epochs, prepared=prepared))

    def commit(self, attributes: Mapping[str, Any] | None = None, name: str = "") -> int:
        """Commit all changes so far. Blocks until they are on stable storage.

        Args:
            attributes: New attributes of the table; None to keep those of the last commit.
            name: Name of the commit, if several tables make it together.

        Returns:
            The number of the commit.

        Raises:
            OSError: If the drive cannot be read or written. The previous commit is still the last one, all changes are still in
                memory, and commit() may be called again. If a flush failed, changes may be lost, and every commit raises the
                flush's error until :meth:`rollback`.
        """
        self.flush()
        attributes = self.epochs.attributes if attributes is None else copy.deepcopy(dict(attributes))
        if self._written_in_epoch or attributes != self.epochs.attributes or name not in ("", self.epochs.name):
            committed = replace(self.epochs, committed=self.epochs.present, attributes=attributes, name=name)
            self._manifest_uncertain = True
            save_manifest(self._layout, committed)
            with defer_interrupts():
                self._manifest_uncertain = False
                self.epochs = committed
                self._written_in_epoch = False
                self.commits += 1
                self._show()
        return self.epochs.committed

    def adopt_prepared(self) -> None:
        """Finish the commit in :attr:`prepared`: it becomes the table's last commit. Blocks. After an OSError, call it again."""
        assert self.prepared is not None
        self._reader.finish_all()
        adopted = self.epochs.adopt(self.prepared)
        save_manifest(self._layout, adopted)
        with defer_interrupts():
            self._cache.clear()
            self.epochs = adopted
            self.prepared = None
            self._show()

    def rollback(self) -> None:
        """Undo all changes since the last commit. Waits for writes in flight. After an OSError, call it again."""
        self._reader.finish_all()
        self.finish_writes()
        self._error = None
        if self._written_in_epoch or self._manifest_uncertain:
            epochs = replace(self.epochs, reserved=self.epochs.present).begin()
            save_manifest(self._layout, epochs)
            present = self.epochs.present
            with defer_interrupts():
                self._cache.drop_changed(present)
                self.epochs = epochs
                self._written_in_epoch = self._manifest_uncertain = False
                self._flush_error = None
                self._show()
        else:
            self._cache.drop_changed(self.epochs.present)

    def finish_writes(self) -> None:
        """Wait for all writes under way."""
        while self._under_way:
            self._finish_oldest()

    def close(self) -> None:
        """Wait for all writes under way. Uncommitted changes are lost."""
        self.finish_writes()
        unchanged = not self._written_in_epoch and not self._manifest_uncertain
        if unchanged and self.epochs.reserved > self.epochs.committed >= self.epochs.present - 1:
            save_manifest(self._layout, replace(self.epochs, reserved=self.epochs.committed))
