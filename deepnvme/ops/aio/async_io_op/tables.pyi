"""Rows of tables in memory; ``csrc/bindings/tables_binding.cpp``. :mod:`deepnvme.tables` is written on it.

Not thread-safe: make one call at a time for each table. Addresses and row numbers are not checked. The GIL is released while rows
are copied or sorted.
"""

VERSION_HEADER_BYTES: int
"""Bytes of the header before each version of a record, in tables with two versions."""

def slot_bytes(record_bytes: int) -> int:
    """Return the bytes that a record takes in the memory of a cache."""

def overhead_bytes(rows: int, slots: int) -> int:
    """Return the bytes that a cache takes in addition to the memory passed to it."""

def first_outside(rows: int, count: int, rows_of_table: int) -> int | None:
    """Return the position of the first number that is not a row of the table, among ``count`` int64 at the address ``rows``."""

class RowCache:
    """The rows of a table that are in memory, and where all rows are on the drive: see ``csrc/tables/geometry.h``.

    ``shards``: first row, bytes from the start of the file to it, and volume of each; empty if rows are striped in chunks.
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
        shards: list[tuple[int, int, int]],
        slots: int,
        memory: int,
    ) -> None: ...
    def set_visible(self, last: int, abandoned: list[tuple[int, int]]) -> None:
        """Set which versions are valid: those of epochs up to ``last``, except the ``abandoned`` ranges."""
    def change(self, rows: int, count: int, records: int, epoch: int) -> list[int]:
        """Replace whole records. Returns the positions of rows that are not in memory, and not changed."""
    def clear(self) -> None:
        """Drop rows that are neither changed nor being written."""
    def drop_changed(self, epoch: int) -> None:
        """Drop rows that were changed in this epoch. No write may be in progress."""
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
    """One read of many rows.

    ``out``: address to which bytes ``[begin, begin + width)`` of each record are copied; 0 to read rows into the cache only.
    ``admit``: whether all rows that are read go into the cache.
    """

    def __init__(self, table: RowCache, rows: int, count: int, out: int, begin: int, width: int, admit: bool) -> None: ...
    def look_up(self) -> None:
        """Copy the rows that the cache has. Call it again, before :meth:`plan`, if the cache may have more rows since."""
    def awaited_parts(self, other: RowBatch) -> list[int]:
        """Return the numbers of the parts of ``other`` that contain missing rows of this read."""
    def leave_out(self, other: RowBatch) -> None:
        """Do not read rows that ``other`` reads. Only for a read without ``out``; call it before :meth:`plan`."""
    def plan(self, part_bytes: int, gap_bytes: int) -> None: ...
    @property
    def hits(self) -> int: ...
    @property
    def numbers(self) -> int: ...
    @property
    def missing(self) -> int:
        """Return the number of different rows that are missing."""
    @property
    def parts(self) -> list[tuple[int, int, int]]:
        """Return the parts to read: (volume, address of the numbers of the units (int64), number of units) of each."""
    def deliver(self, part: int, staging: int, failed: list[int]) -> None:
        """Copy the rows of a part from its units at the address ``staging``. ``failed``: indices of units that were not read."""
    @property
    def stale(self) -> bool:
        """Return whether rows were not copied because they were rewritten during the read. Then all must be read once more."""
    @property
    def failed_rows(self) -> list[tuple[int, int, int, int]]:
        """Return rows that could not be read: number, volume, offset, and first position among the numbers."""

class WriteBatch:
    """Changed rows to be written to the drive. They are copied to the address ``staging``, with room for ``most`` versions."""

    def __init__(self, table: RowCache, most: int, staging: int) -> None: ...
    @property
    def parts(self) -> list[tuple[int, int, int]]:
        """Return the parts to write: (volume, address of the numbers of the versions (int64), number of versions) of each."""
    @property
    def rows(self) -> int: ...
    def written(self, succeeded: bool) -> None:
        """Record that all rows were written or, unless ``succeeded``, that some were not. Call once, after all writes ended."""
