"""Tables of rows on the drive: thousands of small random reads in flight, and rows that are trained."""

from typing import TYPE_CHECKING

from deepnvme._lazy import from_modules

from .layout import State
from .manifest import CorruptTable
from .reading import FailedRow, RowsUnreadable
from .rows_future import PartialRows, RowsFuture
from .session import TableStats
from .table import Table

if TYPE_CHECKING:
    from .embedding import EmbeddingBagOnDisk, EmbeddingOnDisk, Lookahead
    from .ngram_tables import open_ngram_tables
    from .offloading import offload_embeddings
    from .row_optimizer import RowOptimizer, RowWiseAdagrad

__all__ = [
    "CorruptTable",
    "EmbeddingBagOnDisk",
    "EmbeddingOnDisk",
    "FailedRow",
    "Lookahead",
    "PartialRows",
    "RowOptimizer",
    "RowWiseAdagrad",
    "RowsFuture",
    "RowsUnreadable",
    "State",
    "Table",
    "TableStats",
    "offload_embeddings",
    "open_ngram_tables",
]

_LATER = {
    "EmbeddingBagOnDisk": "embedding",
    "EmbeddingOnDisk": "embedding",
    "Lookahead": "embedding",
    "RowOptimizer": "row_optimizer",
    "RowWiseAdagrad": "row_optimizer",
    "offload_embeddings": "offloading",
    "open_ngram_tables": "ngram_tables",
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = from_modules(__name__, _LATER)
