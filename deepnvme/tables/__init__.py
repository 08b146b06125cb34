"""Tables of rows on a drive, read in thousands of small random reads at a time; rows can also be trained in place.

The modules that use them, EmbeddingOnDisk and EmbeddingBagOnDisk, are in :mod:`deepnvme.nn`.
"""

from .embedding import EmbeddingBagOnDisk as EmbeddingBagOnDisk
from .embedding import EmbeddingOnDisk as EmbeddingOnDisk
from .embedding import Lookahead
from .layout import State
from .manifest import CorruptTable
from .ngram_tables import open_ngram_tables
from .offloading import offload_embeddings
from .reading import FailedRow, RowsUnreadable
from .row_optimizer import RowOptimizer
from .row_scales import RowScales
from .row_states import RowWiseAdagrad
from .rows_future import RowsFuture
from .session import TableStats
from .table import Table

__all__ = [
    "CorruptTable",
    "FailedRow",
    "Lookahead",
    "RowOptimizer",
    "RowScales",
    "RowWiseAdagrad",
    "RowsFuture",
    "RowsUnreadable",
    "State",
    "Table",
    "TableStats",
    "offload_embeddings",
    "open_ngram_tables",
]


def __dir__() -> list[str]:
    """Return the public names, without the submodules that define them."""
    return sorted(__all__)
