"""Tables of rows on the drive: thousands of small random reads in flight, and rows that are trained."""

from .layout import State
from .manifest import CorruptTable
from .reading import FailedRow, RowsFuture, RowsUnreadable
from .table import PartialRows, Table, TableStats

__all__ = ["CorruptTable", "FailedRow", "PartialRows", "RowsFuture", "RowsUnreadable", "State", "Table", "TableStats"]
