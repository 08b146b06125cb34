"""Changed rows: kept in memory, written behind, and committed together."""

from __future__ import annotations

import copy
import uuid
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from deepnvme._interrupts import defer_interrupts
from deepnvme.engine import Engine, File, Future
from deepnvme.ops import load_async_io

from .identity import write_identity
from .layout import TableLayout
from .manifest import Epochs, Prepared, save_manifest
from .reading import RowReader, StagingPool, int64_at

if TYPE_CHECKING:
    from deepnvme.ops.aio.async_io_op.tables import RowCache, WriteBatch

_RESERVED_EPOCHS = 1 << 16
"""Commits until the manifest has to be written once more. Of so many epochs, a writer that crashes abandons the rest."""


@dataclass(eq=False)
class _Write:
    """Rows on their way to the drive."""

    native: WriteBatch
    staging: torch.Tensor
    futures: list[Future]
    incomplete: bool = False
    """Whether some of it was refused."""


class RowWriter:
    """Changes rows of one table, whose two versions make a commit whole or undone. Its methods are called with the table's
    lock held.

    A changed row stays in memory until it is written, which is begun when a quarter of the cache is changed. It is written to the
    version that the last commit does not have. A commit waits for all of that, flushes the files, and then says in the
    manifest which epoch is the last that counts.

    Args:
        engine: Writes the files.
        files: Of the layout, open for reading and writing.
        layout: Where the rows are.
        cache: The rows that are in memory.
        reader: Reads rows that are not.
        directories: Of the table; the first has the manifest.
        epochs: Of the manifest, for a new writer.
        staging_bytes: Bytes of memory for rows that are being written.
    """

    def __init__(
        self,
        engine: Engine,
        files: Sequence[File],
        layout: TableLayout,
        cache: RowCache,
        reader: RowReader,
        directories: list[Path],
        epochs: Epochs,
        staging_bytes: int,
    ) -> None:
        self._engine, self._files, self._layout, self._cache, self._reader = engine, files, layout, cache, reader
        self._directories = directories
        self.epochs = replace(epochs, prepared=None)
        self.prepared = epochs.prepared
        """A commit of the writer before that other tables may have; None once a row was changed here."""
        self._written_in_epoch = False
        self._identity_written = False  # into the files, which only a commit flushes
        self._manifest_uncertain = False  # a commit failed or was interrupted, and may be in force nevertheless
        self._flush_error: OSError | None = None
        self._flushed = False  # nothing was changed since the last flush
        self._staging = StagingPool(engine, staging_bytes, layout.version_bytes, layout.version_bytes)
        self._rows_per_part = self._staging.part_bytes // layout.version_bytes
        self._under_way: deque[_Write] = deque()
        self._error: OSError | None = None
        self.commits = self.bytes_written = self.rows_written = 0
        self._show()

    def _show(self) -> None:
        self._cache.set_visible(self.epochs.present, list(self.epochs.abandoned))

    @property
    def rows_at_a_time(self) -> int:
        """Most rows that :meth:`change` takes: they are all in memory before they are written."""
        return max((self._cache.slots - self._cache.pinned) // 4, 1)

    def change(self, rows: torch.Tensor, records: torch.Tensor) -> None:
        """Replace the records of rows.

        Args:
            rows: Their numbers, int64, contiguous, each once; at most :attr:`rows_at_a_time`.
            records: Bytes of shape (rows, record), contiguous.

        Raises:
            OSError: From the drive. Some rows may have been changed then.
        """
        self.prepared = None
        self._flushed = False
        self._make_room(len(rows))
        epoch = self.epochs.present
        while absent := self._cache.change(rows.data_ptr(), len(rows), records.data_ptr(), epoch):
            # Where their last committed version is, is read from the drive.
            rows, records = rows[absent].contiguous(), records[absent].contiguous()
            self._reader.load(rows)
        self.write_behind()

    @property
    def writing_behind(self) -> bool:
        """Whether there is something to write, or a write under way, without anybody waiting for it."""
        return bool(self._under_way) or self._much_changed()

    def _much_changed(self) -> bool:
        """After an error, nothing is written until the next change or commit has raised it: a drive that fails is not asked again
        and again."""
        return self._error is None and self._cache.changed > 0 and self._cache.changed >= self._cache.slots // 4

    def write_behind(self, parts: int | None = None) -> None:
        """Go on writing if much is changed, as far as there is staging memory. Does not block; errors are raised by what changes
        or commits next.

        Args:
            parts: Most parts whose write is begun; None for all.
        """
        try:
            self._collect()
            if self._much_changed():
                self._write_some(parts)
        except OSError as error:
            self._error = error

    def next_written(self) -> Future | None:
        """Go on writing, some of it.

        Returns:
            A write to wait for until there is more to do; None if nothing has to be written now.
        """
        self.write_behind()
        return next((future for write in self._under_way for future in write.futures if not future.done()), None)

    def _make_room(self, rows: int) -> None:
        """Have so many rows in memory that need not stay."""
        most = self._cache.slots - self._cache.pinned - rows
        while self._cache.changed + self._cache.writing > most:
            if not self._write_some(1):
                if not self._under_way:
                    break
                self._finish_oldest()
            self._raise_error()

    def _write_some(self, parts: int | None = None) -> int:
        """Begin to write changed rows, as far as there is memory for it. Returns how many parts were begun.

        Does not block, but for the first write of an epoch.
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
        """Have the manifest say that versions of this epoch may be on the drive, before they are. Before the first ones of this
        writer the table gets a new identity, so that its files are not taken for those of a copy any more.
        """
        reserving = self.epochs
        if reserving.present > reserving.reserved:
            reserving = replace(reserving, reserved=reserving.present + _RESERVED_EPOCHS)
        if not self._identity_written:
            former = (*reserving.previous, reserving.identity)
            reserving = replace(reserving, identity=uuid.uuid4().hex, previous=former)
        if reserving is not self.epochs or self._manifest_uncertain:
            save_manifest(self._directories, self._layout, reserving)
            with defer_interrupts():
                self.epochs = reserving
                self._manifest_uncertain = False
        if not self._identity_written:
            for future in write_identity(self._engine, self._files, self._layout, self.epochs.identity):
                future.result()
            self._identity_written = True
        self._written_in_epoch = True

    def _write_part(self) -> bool:
        """Begin to write some rows. Returns whether there were any that are not being written already."""
        size = self._layout.version_bytes
        with defer_interrupts():
            staging = self._staging.take()
            native = load_async_io().tables.WriteBatch(self._cache, self._rows_per_part, staging.data_ptr())
            if not native.rows:
                self._staging.give_back(staging)
                return False
            write = _Write(native, staging, [])
            self._under_way.append(write)
            begin = 0
            try:
                for volume, address, count in native.parts:
                    versions = write.staging[begin * size : (begin + count) * size].view(count, size)
                    write.futures.append(self._engine.scatter(self._files[volume], int64_at(address, count), versions))
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
        """Note which writes have ended."""
        while self._under_way and all(future.done() for future in self._under_way[0].futures):
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        """Wait for the oldest write. If this is interrupted, it is under way still."""
        write = self._under_way[0]
        errors = [error for future in write.futures if (error := future.exception()) is not None]
        with defer_interrupts():
            if errors:
                self._error = errors[0]
            write.native.written(not errors and not write.incomplete)
            self._under_way.popleft()
            self._staging.give_back(write.staging)

    def _raise_error(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def flush(self) -> None:
        """Write all that is changed, to stable storage. Blocks. Raises OSError; what was not written is still changed."""
        if self._flush_error is not None:
            raise self._flush_error
        if self._flushed:
            return
        self.finish_writes()
        self._error = None  # what could not be written is still changed, and is written once more now
        while self._cache.changed or self._under_way:
            self._write_some()
            if self._under_way:
                self._finish_oldest()
            self._raise_error()
        if self._written_in_epoch:
            errors = []
            for future in [self._engine.fsync(file) for file in self._files]:
                if (error := future.exception()) is not None:
                    errors.append(error)
            if errors:
                # The system may have dropped what it could not write, and a second flush would not tell.
                self._flush_error = errors[0]
                raise errors[0]
        self._flushed = True

    def prepare(self, name: str, attributes: Mapping[str, Any]) -> None:
        """Have all changes so far on the drive, so that :meth:`commit` of the same name and attributes only has to say so. A
        writer that comes after a crash finds it in :attr:`prepared`. Blocks.

        Raises:
            OSError: As :meth:`commit` does.
        """
        self.flush()
        prepared = Prepared(epoch=self.epochs.present, name=name, attributes=dict(attributes))
        self._manifest_uncertain = True
        save_manifest(self._directories, self._layout, replace(self.epochs, prepared=prepared))

    def commit(self, attributes: Mapping[str, Any] | None = None, name: str = "") -> int:
        """Make all changes so far the table's last commit. Blocks.

        Args:
            attributes: What is noted with it from now on; None for what is.
            name: Of the commit, if it is made together with those of other tables.

        Returns:
            Its number.

        Raises:
            OSError: From the drive. The last commit is the one before then, and all changes are still there: commit again. Only
                if the flush has failed, they may be lost, and every commit raises this until :meth:`rollback`.
        """
        self.flush()
        attributes = self.epochs.attributes if attributes is None else copy.deepcopy(dict(attributes))
        if self._written_in_epoch or attributes != self.epochs.attributes or name not in ("", self.epochs.name):
            committed = replace(self.epochs, committed=self.epochs.present, attributes=attributes, name=name)
            if self._written_in_epoch:  # and flushed, with the identity
                committed = replace(committed, previous=())
            self._manifest_uncertain = True
            save_manifest(self._directories, self._layout, committed)
            with defer_interrupts():
                self._manifest_uncertain = False
                self.epochs = committed
                self._written_in_epoch = False
                self.commits += 1
                self._show()
        return self.epochs.committed

    def adopt_prepared(self) -> None:
        """Make the prepared commit the last one. Blocks. Raises OSError; call it again then."""
        assert self.prepared is not None
        self._reader.finish_all()
        adopted = self.epochs.adopt(self.prepared)
        save_manifest(self._directories, self._layout, adopted)
        with defer_interrupts():
            self._cache.clear()
            self.epochs = adopted
            self.prepared = None
            self._show()

    def rollback(self) -> None:
        """Go back to the last commit. Blocks for writes under way. Raises OSError; call it again then."""
        self._reader.finish_all()
        self.finish_writes()
        self._error = None
        if self._written_in_epoch or self._manifest_uncertain:
            epochs = replace(self.epochs, reserved=self.epochs.present).begin()
            save_manifest(self._directories, self._layout, epochs)
            present = self.epochs.present
            with defer_interrupts():
                self._cache.drop_changed(present)
                self.epochs = epochs
                self._written_in_epoch = self._manifest_uncertain = self._identity_written = False
                self._flush_error = None
                self._show()
        else:
            self._cache.drop_changed(self.epochs.present)

    def finish_writes(self) -> None:
        """Wait for writes under way."""
        while self._under_way:
            self._finish_oldest()

    def close(self) -> None:
        """Wait for writes under way. What was not committed is lost."""
        self.finish_writes()
        unchanged = not self._written_in_epoch and not self._manifest_uncertain
        if unchanged and self.epochs.reserved > self.epochs.committed >= self.epochs.present - 1:
            save_manifest(self._directories, self._layout, replace(self.epochs, reserved=self.epochs.committed))
