"""Rows of tables in memory; ``csrc/bindings/tables_binding.cpp``. :mod:`deepnvme.tables` is written on it.

One call at a time for each table: nothing here locks. Nothing checks addresses or the numbers of rows. The GIL is released where
rows are copied or sorted.
"""

VERSION_HEADER_BYTES: int
"""In front of each version of a record, in tables with two."""

def slot_bytes(record_bytes: int) -> int:
    """Return the bytes that a record takes in the memory of a cache."""

def overhead_bytes(rows: int, slots: int) -> int:
    """Return the bytes that a cache takes besides the memory that it is given."""

def first_outside(rows: int, count: int, rows_of_table: int) -> int | None:
    """Return the position of the first number that is no row's, of ``count`` int64 at the address ``rows``."""

class RowCache:
    """The rows of a table that are in memory, and where all rows are on the drive: see ``csrc/tables/geometry.h``.

    ``shards``: first row, and bytes from the start of the file to it, of each volume; empty if rows are striped in chunks.
    ``memory``: the address of ``slots * slot_bytes(record_bytes)`` bytes, which outlive this.
    """

    def __init__(
        self,
        *,
        rows: int,
        record_bytes: int,
        base: int,
        stride: int,
        unit: int,
        version_bytes: int,
        volumes: int,
        chunk: int,
        shards: list[tuple[int, int]],
        slots: int,
        memory: int,
    ) -> None: ...
    def set_visible(self, last: int, abandoned: list[tuple[int, int]]) -> None:
        """Have the versions of epochs up to ``last`` count, without the ranges that were abandoned."""
    def change(self, rows: int, count: int, records: int, epoch: int) -> list[int]:
        """Replace whole records. Returns the positions of rows that are not in memory, and not changed."""
    def clear(self) -> None:
        """Drop rows that are neither changed nor being written."""
    def drop_changed(self, epoch: int) -> None:
        """Drop rows that were changed in this epoch. No write is under way."""
    @property
    def slots(self) -> int: ...
    @property
    def used(self) -> int: ...
    @property
    def changed(self) -> int:
        """Return the number of rows that are changed, and not being written."""
    @property
    def writing(self) -> int: ...

class RowBatch:
    """One read of many rows. ``out``: an address, or 0 to have the rows in the cache only; of each record, bytes
    ``[begin, begin + width)`` are copied to it. ``admit``: whether all rows that are read go into the cache.
    """

    def __init__(self, table: RowCache, rows: int, count: int, out: int, begin: int, width: int, admit: bool) -> None: ...
    def look_up(self) -> None:
        """Copy what the cache has. To be called again, before :meth:`plan`, when more may have come."""
    def awaited_parts(self, other: RowBatch) -> list[int]:
        """Return the numbers of the other one's parts that have rows which this one misses."""
    def leave_out(self, other: RowBatch) -> None:
        """Have rows that the other one reads not be read by this one, which has no ``out``. Before :meth:`plan`."""
    def plan(self, part_bytes: int, gap_bytes: int) -> None: ...
    @property
    def hits(self) -> int: ...
    @property
    def numbers(self) -> int: ...
    @property
    def missing(self) -> int:
        """Return the number of rows that are missing, each once."""
    @property
    def parts(self) -> list[tuple[int, int, int]]:
        """Return what is to be read: the volume, the address of the units' numbers (int64), and how many they are."""
    def deliver(self, part: int, staging: int, failed: list[int]) -> None:
        """Copy the rows of a part whose units are at the address ``staging``, but for those that could not be read."""
    @property
    def stale(self) -> bool:
        """Return whether rows were not delivered because newer ones were written while they were read: read all once more."""
    @property
    def failed_rows(self) -> list[tuple[int, int, int, int]]:
        """Return rows that could not be read: number, volume, offset, and first position among the numbers."""

class WriteBatch:
    """Changed rows on their way to the drive, copied to the address ``staging``, which has room for ``most`` versions."""

    def __init__(self, table: RowCache, most: int, staging: int) -> None: ...
    @property
    def parts(self) -> list[tuple[int, int, int]]:
        """Return what is to be written: the volume, the address of the versions' numbers (int64), and how many they are."""
    @property
    def rows(self) -> int: ...
    def written(self, succeeded: bool) -> None:
        """Say that all were written, or that some were not: once, when nothing is under way any more."""
