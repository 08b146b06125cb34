"""Tables of rows on the drive: thousands of small random reads in flight, and rows that are trained."""

from typing import TYPE_CHECKING

from deepnvme._lazy import from_modules

from .layout import State
from .manifest import CorruptTable
from .reading import FailedRow, RowsFuture, RowsUnreadable
from .row_read import PartialRows
from .table import Table
from .table_stats import TableStats

if TYPE_CHECKING:
    from .embedding import EmbeddingBagOnDisk, EmbeddingOnDisk
    from .lookahead import Lookahead
    from .ngram_tables import RowShards, ShardsFuture, open_ngram_tables
    from .offloading import offload_embeddings
    from .row_optimizer import RowOptimizer
    from .row_wise_adagrad import RowWiseAdagrad

__all__ = [
    "CorruptTable",
    "EmbeddingBagOnDisk",
    "EmbeddingOnDisk",
    "FailedRow",
    "Lookahead",
    "PartialRows",
    "RowOptimizer",
    "RowShards",
    "RowWiseAdagrad",
    "RowsFuture",
    "RowsUnreadable",
    "ShardsFuture",
    "State",
    "Table",
    "TableStats",
    "offload_embeddings",
    "open_ngram_tables",
]

_LATER = {
    "EmbeddingBagOnDisk": "embedding",
    "EmbeddingOnDisk": "embedding",
    "Lookahead": "lookahead",
    "RowOptimizer": "row_optimizer",
    "RowShards": "ngram_tables",
    "RowWiseAdagrad": "row_wise_adagrad",
    "ShardsFuture": "ngram_tables",
    "offload_embeddings": "offloading",
    "open_ngram_tables": "ngram_tables",
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = from_modules(__name__, _LATER)
