"""Counters of a table, for those who tune its memory."""

from __future__ import annotations

from dataclasses import dataclass

from deepnvme.telemetry.report_figures import ReportFigures


@dataclass(frozen=True)
class TableStats(ReportFigures):
    """What a table has done since it was opened. ``as_dict()`` has the numbers."""

    hits: int
    """Numbers of rows that were in memory when they were asked for."""
    misses: int
    """Numbers of rows that were not."""
    rows_read: int
    """Rows read from the drive: of several equal numbers in a call, one."""
    rows_written: int
    """Rows written to the drive."""
    bytes_read: int
    """Bytes read from the drive: whole sectors, and what lies between rows that are read together."""
    bytes_written: int
    """Bytes written to the drive."""
    commits: int
    """Number of commits."""
    cached_rows: int
    """Rows that are in memory now."""
    cache_capacity: int
    """Rows that memory has room for."""
    changed_rows: int
    """Rows that are not written yet."""
    pinned_rows: int
    """Rows that stay in memory."""

    @property
    def hit_rate(self) -> float:
        """Share of the numbers that were in memory, 0 to 1; 0 before the first read."""
        return self.hits / max(self.hits + self.misses, 1)
