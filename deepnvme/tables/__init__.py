"""Tables of rows on a drive, read in thousands of small random reads at a time; rows can also be trained in place."""

from .embedding import EmbeddingBagOnDisk, EmbeddingOnDisk, Lookahead
from .layout import State
from .manifest import CorruptTable
from .ngram_tables import open_ngram_tables
from .offloading import offload_embeddings
from .reading import FailedRow, RowsUnreadable
from .row_optimizer import RowOptimizer
from .row_states import RowWiseAdagrad
from .rows_future import RowsFuture
from .session import TableStats
from .table import Table

__all__ = [
    "CorruptTable",
    "EmbeddingBagOnDisk",
    "EmbeddingOnDisk",
    "FailedRow",
    "Lookahead",
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
