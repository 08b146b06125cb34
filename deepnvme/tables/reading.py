"""Reads rows: from the cache in memory, and missing rows from the drive.

Rows are read from the drive in parts, so that one part is copied while others are being read.
"""

from __future__ import annotations

import ctypes
import errno
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch

from deepnvme._interrupts import defer_interrupts
from deepnvme.engine import Engine, File, Future
from deepnvme.memory.alignment import padded
from deepnvme.ops import load_async_io
from deepnvme.telemetry.profiler_ranges import profiler_range

from .layout import TableLayout

if TYPE_CHECKING:
    from deepnvme.ops.aio.async_io_op.tables import RowBatch, RowCache

_GAP_BYTES = 4096
"""Two rows with at most this many bytes between them are read at once: a drive reads 8 KiB nearly as quickly as 4 KiB."""

_FEW_UNITS = 32
"""Parts with at most this many units each, on average, are read by one call. 16 rows in 16 files: 0.7 ms instead of 2.1 ms."""

DEFAULT_STAGING_BYTES = 48 << 20
"""Staging memory of a table, for reads and writes together."""
_MOST_PART_BYTES = 1 << 20
_LEAST_PART_BYTES = 256 << 10
"""Least bytes of a part: 64 rows of 4 KiB. Smaller parts have too few reads to keep a drive busy."""
_WANTED_PARTS = 8
_FEWEST_PARTS = 2
"""Least number of parts: one is copied while the other is read or written."""


class RowsUnreadable(OSError):
    """Raised if some rows could not be read. The message names the first of them; all other rows were read.

    ``errno`` and ``filename`` are those of the drive's error.
    """

    failed: tuple[FailedRow, ...] = ()
    """All rows that could not be read, each once: those of a broken page, and those that were read by the same request."""


class FailedRow(NamedTuple):
    """A row that could not be read."""

    row: int
    file: str
    offset: int
    """Bytes from the start of the file to the row's record."""


def int64_at(address: int, count: int) -> torch.Tensor:
    """Return int64 numbers in native memory as a tensor, without a copy: valid as long as the memory is."""
    return torch.frombuffer((ctypes.c_int64 * count).from_address(address), dtype=torch.int64)


_PlannedPart = tuple[int, int, int]
"""Volume, address of the int64 numbers of the part's read units, and number of units."""


@dataclass(eq=False)
class _Part:
    """Read units that are read together into one part of the staging memory: a planned part, or several small ones."""

    read: RowRead
    counts: dict[int, int]
    """Number of units of each planned part, by its number. The units follow one another in the staging memory."""
    future: Future
    places: Sequence[int]
    """Of each unit that the future reads, the place among all units, ascending. Not read are incomplete units at files' ends."""
    staging: torch.Tensor
    delivered: bool = False


@dataclass(eq=False)
class RowRead:
    """One batch of rows that :class:`RowReader` reads; it is used for one read only."""

    native: RowBatch
    keep: object
    """The owner of the memory that rows are copied to, kept alive until all rows are copied."""
    unstarted: dict[int, _PlannedPart] = field(default_factory=dict)
    """Parts of a prefetch whose read has not been started, by part number."""
    parts: list[_Part] = field(default_factory=list)
    """Parts being read. A part is removed once its rows are copied.

    Each part refers to this object: such a cycle would keep all its memory until the garbage collector runs.
    """
    errors: list[OSError] = field(default_factory=list)
    abandoned: bool = False
    """Whether the rows are no longer wanted: the memory for them must not be written any more."""

    @property
    def delivered(self) -> bool:
        """Whether all parts were read, and their rows copied to the cache and the caller's memory."""
        return not self.parts and not self.unstarted

    def abandon(self) -> None:
        """Copy no further rows: the caller may use the memory for something else from now on."""
        self.abandoned = True
        self.unstarted.clear()


class RowReader:
    """Reads rows of one table. Its methods must be called with the table's lock held, unless they say otherwise.

    Args:
        engine: Reads the files.
        files: The layout's files, open for reading.
        layout: Where the rows are.
        cache: The rows that are in memory.
        lock: The table's lock.
        staging_bytes: Bytes of memory for rows that are being read.
    """

    def __init__(
        self, engine: Engine, files: Sequence[File], layout: TableLayout, cache: RowCache, lock: threading.RLock,
        staging_bytes: int,
    ) -> None:  # fmt: skip
        self._engine, self._files, self._layout, self._cache, self._lock = engine, files, layout, cache, lock
        self.unit = unit_of(layout, files)
        extent = padded(layout.stride + self.unit, self.unit)
        self._staging = StagingPool(engine, staging_bytes, extent, self.unit)
        self._under_way: deque[_Part] = deque()  # the oldest first
        self._kept_for_callers = max(self._staging.parts // 4, 1)  # parts that prefetches leave free
        self._prefetches: list[RowRead] = []  # not delivered completely
        # A file may end within a sector: its end cannot be read as a unit.
        self._ends = [self._read_end(file, number) for number, file in enumerate(files)]
        self.hits = self.misses = self.rows_read = self.bytes_read = 0

    def _read_end(self, file: File, volume: int) -> tuple[int, torch.Tensor]:
        """Return the number and the bytes of a file's last, incomplete unit; no bytes if all units are whole."""
        whole, rest = divmod(file.size(), self.unit)
        end = torch.zeros(rest, dtype=torch.uint8)
        if rest and whole * self.unit < self._layout.bytes_in(volume):
            self._engine.read(end, file, whole * self.unit).result()
        return whole, end

    def new_read(self, rows: torch.Tensor, out: torch.Tensor | None, width: int, admit: bool) -> RowRead:
        """Return a read of rows, without starting it.

        Args:
            rows: Row numbers, int64, contiguous.
            out: Contiguous memory, ``width`` bytes for each row number; None to read rows into the cache only.
            width: Bytes of each record to copy, from its beginning.
            admit: Whether all rows that are read go into the cache.
        """
        address = 0 if out is None else out.data_ptr()
        rows_of = load_async_io().tables.RowBatch
        return RowRead(rows_of(self._cache, rows.data_ptr(), rows.numel(), address, 0, width, admit), out)

    def start(self, read: RowRead) -> None:
        """Copy the rows that are in the cache, and start reading the others.

        Blocks while all staging memory is in use, and until parts of prefetches that contain the same rows are read.

        Raises:
            OSError: If a file cannot be read at all. The read is abandoned then.
        """
        native = read.native
        try:
            self.collect()
            native.look_up()
            if self._finish_prefetched(native):
                native.look_up()
            native.plan(self._staging.part_bytes, _GAP_BYTES)
            self.hits += native.hits
            self.misses += native.numbers - native.hits
            self.rows_read += native.missing
            parts = dict(enumerate(native.parts))
            units = sum(count for _, _, count in parts.values())
            if units <= _FEW_UNITS * len(parts) and units * self.unit <= self._staging.part_bytes:
                self._start_parts(read, parts)
            else:
                for number, part in parts.items():
                    self._start_parts(read, {number: part})
        except BaseException:
            read.abandon()
            raise

    def load(self, rows: torch.Tensor) -> None:
        """Read rows into the cache, as far as there is room. Blocks. The rows do not count as hits or misses.

        Args:
            rows: Row numbers, int64, contiguous.

        Raises:
            RowsUnreadable, OSError: If rows cannot be read.
        """
        hits, misses = self.hits, self.misses
        read = self.new_read(rows, None, 0, True)
        self.start(read)
        self.hits, self.misses = hits, misses  # nobody has asked for these rows
        self.finish(read)
        failure = self.failure_of(read)
        if failure is not None:
            raise failure

    def prefetch(self, rows: torch.Tensor) -> None:
        """Start reading rows into the cache. Never waits for the drive.

        Prefetches use only staging memory that is free and not reserved for callers. The remaining parts are started later, by
        :meth:`next_prefetched`, by :meth:`collect`, or by a read of the same rows.

        Raises:
            OSError: If a file cannot be read at all.
        """
        read = self.new_read(rows, None, 0, True)
        native = read.native
        self.collect()
        native.look_up()
        for each in self._prefetches:
            native.leave_out(each.native)
        native.plan(self._staging.part_bytes, _GAP_BYTES)
        read.unstarted.update(enumerate(native.parts))
        if read.unstarted:
            self.rows_read += native.missing
            self._prefetches.append(read)
            self._start_prefetches()

    @property
    def prefetching(self) -> bool:
        """Whether any prefetch has rows that are not in the cache yet."""
        return bool(self._prefetches)

    def next_prefetched(self) -> Future | None:
        """Copy one part of a prefetch that has been read to the cache, and start further parts. Does not wait for the drive.

        Returns:
            The read to wait for before the next call; None if no prefetch is left.
        """
        try:
            arrived = [part for each in self._prefetches for part in each.parts if part.future.done()]
            for part in arrived[:1]:  # one at a time: others wait for the lock
                self._deliver(part)
            self._prefetches = [read for read in self._prefetches if not read.delivered]
            self._start_prefetches()
        except (OSError, ValueError):  # a read of the same rows raises the error
            self.drop_prefetches()
        for read in self._prefetches:
            for part in read.parts:
                return part.future
        # Other reads have all staging memory: the prefetch goes on when one of them ends.
        return self._under_way[0].future if self._prefetches and self._under_way else None

    def drop_prefetches(self) -> None:
        """Start no further parts of prefetches."""
        for read in self._prefetches:
            read.unstarted.clear()
        self._prefetches = [read for read in self._prefetches if not read.delivered]

    def _start_prefetches(self) -> None:
        for read in self._prefetches:
            while read.unstarted:
                if self._staging.free <= self._kept_for_callers:
                    return
                self._start_planned(read, next(iter(read.unstarted)))

    def _start_planned(self, read: RowRead, number: int) -> None:
        self._make_room()  # it may wait for the drive: interrupts are let through
        with defer_interrupts():
            try:
                self._start_parts(read, {number: read.unstarted[number]})
            finally:
                read.unstarted.pop(number, None)

    def _finish_prefetched(self, native: RowBatch) -> bool:
        """Wait for the parts of prefetches that contain missing rows of a read. Returns whether there were any."""
        awaited = [(read, number) for read in self._prefetches for number in native.awaited_parts(read.native)]
        for read, number in awaited:
            if number in read.unstarted:
                self._start_planned(read, number)
        for read, number in awaited:
            for part in [each for each in read.parts if number in each.counts]:
                self._deliver(part)
        self._prefetches = [read for read in self._prefetches if not read.delivered]
        return bool(awaited)

    def _start_parts(self, read: RowRead, parts: Mapping[int, _PlannedPart]) -> None:
        """Start reading planned parts into one part of the staging memory. Does nothing if there are none."""
        if not parts:
            return
        self._make_room()
        with defer_interrupts():
            staging = self._staging.take()
            counts = {number: count for number, (_, _, count) in parts.items()}
            memory = staging[: sum(counts.values()) * self.unit].view(-1, self.unit)
            try:
                places, future = self._start_units(list(parts.values()), memory)
            except BaseException as error:
                self._staging.give_back(staging)
                if isinstance(error, ValueError) and hasattr(error, "file_size"):
                    raise self._changed_size([volume for volume, _, _ in parts.values()], error.file_size) from error
                raise
            started = _Part(read, counts, future, places, staging)
            read.parts.append(started)
            self._under_way.append(started)
        self.bytes_read += len(places) * self.unit

    def _start_units(self, parts: Sequence[_PlannedPart], memory: torch.Tensor) -> tuple[Sequence[int], Future]:
        """Start reading the units of planned parts into ``memory``, of shape (units, bytes). Return their places, and the future.

        Units of several parts are read by one call: a call for each part would take longer than the drive, where the few rows of
        a token are in many files. Many units of one part are read by ``gather``, which takes less time for each.
        """
        places: list[int] = []
        files: list[File] = []
        offsets: list[int] = []
        at = 0
        for volume, address, count in parts:
            units = int64_at(address, count)
            whole, end = self._ends[volume]
            if int(units[-1]) == whole:
                memory[at + count - 1][: len(end)] = end
                units = units[:-1]
            if len(parts) == 1:
                return range(len(units)), self._engine.gather(self._files[volume], units, memory[: len(units)])
            places += range(at, at + len(units))
            files += [self._files[volume]] * len(units)
            offsets += (units * self.unit).tolist()
            at += count
        rows = memory.unbind()
        return places, self._engine.read_many([rows[place] for place in places], files, offsets)

    def _make_room(self) -> None:
        """If no part of staging memory is free, free one that has been read, or else wait for the oldest one."""
        while not self._staging.free:
            self._deliver(next((part for part in self._under_way if part.future.done()), self._under_way[0]))

    def _changed_size(self, volumes: Sequence[int], size: int) -> OSError:
        """Return the error for the first of the files that is too short. ``size``: bytes of the file that was found so."""
        short = (volume for volume in volumes if self._files[volume].size() < self._layout.bytes_in(volume))
        volume = next(short, volumes[0])
        file, wanted = self._files[volume], self._layout.bytes_in(volume)
        return OSError(errno.ESTALE, f"the file has {size} bytes, and the table had {wanted} in it when it was opened", file.path)

    def _deliver(self, part: _Part) -> None:
        """Wait for a part, copy its rows to the cache and the caller's memory, and free its staging memory. Idempotent."""
        if part.delivered:
            return
        with profiler_range("wait_rows"):
            error = part.future.exception()
        failed: list[int] = []
        if error is not None:
            indices = getattr(error, "indices", None) or range(len(part.places))
            failed = [part.places[index] for index in indices]
        with defer_interrupts():
            if error is not None:
                part.read.errors.append(error)
            if not part.read.abandoned:
                begin = 0
                for number, count in part.counts.items():
                    of_part = [place - begin for place in failed if begin <= place < begin + count]
                    part.read.native.deliver(number, part.staging.data_ptr() + begin * self.unit, of_part)
                    begin += count
            part.delivered = True
            part.read.parts.remove(part)
            self._under_way.remove(part)
            self._staging.give_back(part.staging)

    def collect(self) -> None:
        """Copy the parts that have been read to the cache and the callers' memory, then start further parts of prefetches."""
        for part in list(self._under_way):
            if part.future.done():
                self._deliver(part)
        self._prefetches = [read for read in self._prefetches if not read.delivered]
        self._start_prefetches()

    def finish(self, read: RowRead) -> None:
        """Wait for all rows of a read. May be called without the lock, and does not hold the lock while it waits."""
        for part in list(read.parts):
            if not part.delivered:
                with profiler_range("wait_rows"):
                    part.future.exception()
            with self._lock:
                self._deliver(part)

    def abandon(self, read: RowRead) -> None:
        """Copy no further rows to a read's caller once this method returns. May be called without the lock."""
        with defer_interrupts(), self._lock:
            read.abandon()

    def finish_all(self) -> None:
        """Wait for all parts being read. Parts of prefetches that were not started are dropped."""
        self.drop_prefetches()
        while self._under_way:
            self._deliver(self._under_way[0])
        self._prefetches.clear()

    def failure_of(self, read: RowRead) -> RowsUnreadable | None:
        """Return the error that names the rows of a finished read that could not be read; None if all could."""
        failed = read.native.failed_rows
        if not failed:
            return None
        rows = tuple(FailedRow(row, self._files[volume].path, offset) for row, volume, offset, _ in sorted(failed))
        cause, first = read.errors[0], rows[0]
        more = f", and {len(rows) - 1} other rows" if len(rows) > 1 else ""
        text = f"row {first.row} at offset {first.offset}{more}: {cause.strerror}"
        # The engine reports ENODATA for a read that ended early: the file has become shorter.
        error = RowsUnreadable(errno.ESTALE if cause.errno == errno.ENODATA else cause.errno, text, first.file)
        error.failed = rows
        error.__cause__ = cause
        return error


def unit_of(layout: TableLayout, files: Sequence[File]) -> int:
    """Return the bytes of a unit: reads of a table's files begin and end at multiples of it.

    A unit is a record with all its versions if it is whole, aligned sectors, or else a sector.
    """
    sector = max(512, *(file.sector_size for file in files))
    whole = layout.stride % sector == 0 and all(shard.base % layout.stride == 0 for shard in layout.shards)
    return layout.stride if whole else sector


class StagingPool:
    """Pinned memory in parts of equal size. It is allocated when the first part is taken.

    Args:
        engine: Allocates the memory.
        nbytes: Bytes of all parts. A part has 1 MiB, or less if there would be fewer than 8 parts, but at least 256 KiB and
            ``row_bytes``. There are at least two parts, even if they are more than ``nbytes``.
        row_bytes: Least size of a part.
        multiple: The size of a part is a multiple of this.
    """

    def __init__(self, engine: Engine, nbytes: int, row_bytes: int, multiple: int) -> None:
        self._engine = engine
        wanted = min(max(nbytes // _WANTED_PARTS, _LEAST_PART_BYTES), _MOST_PART_BYTES)
        self.part_bytes = max(wanted // multiple * multiple, padded(row_bytes, multiple))
        """Bytes of a part."""
        self.parts = max(nbytes // padded(self.part_bytes, 4096), _FEWEST_PARTS)
        """Number of parts, in use or free."""
        self._free: deque[torch.Tensor] | None = None

    @property
    def free(self) -> int:
        """Number of parts that :meth:`take` can return at once."""
        return self.parts if self._free is None else len(self._free)

    def take(self) -> torch.Tensor:
        """Return a free part, bytes of shape (part_bytes,). Raises MemoryError if the memory cannot be allocated."""
        if self._free is None:
            memory = self._engine.empty_pinned(self.parts * padded(self.part_bytes, 4096), torch.uint8)
            self._free = deque(part[: self.part_bytes] for part in memory.view(self.parts, -1))
        return self._free.popleft()

    def give_back(self, part: torch.Tensor) -> None:
        """Return a part that :meth:`take` has lent, so that it can be taken again."""
        assert self._free is not None
        self._free.append(part)
