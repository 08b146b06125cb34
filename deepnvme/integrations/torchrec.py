"""TorchRec's ``EmbeddingBagCollection`` with its tables on a drive.

    collection = EmbeddingBagCollectionOnDisk(tables, path="/mnt/nvme/tables", optimizer=torch.optim.SparseAdam)
    optimizer = RowOptimizer(collection, lr=1e-3)
    pooled = collection(features)  # a KeyedTensor

Nothing of TorchRec is imported here: configurations and features are used by their attributes, and the result is the
``KeyedTensor`` of the module that has the class of the features.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from deepnvme.memory.budget import MemoryBudget, budget_bytes
from deepnvme.tables import EmbeddingBagOnDisk
from deepnvme.tables.creating import Values
from deepnvme.tables.reading import DEFAULT_STAGING_BYTES
from deepnvme.tables.row_states import OptimizerFactory
from deepnvme.tables.table import DEFAULT_MEMORY_BUDGET, TableMemory, as_paths
from deepnvme.telemetry.sizes import ByteCount, byte_count

if TYPE_CHECKING:
    from deepnvme.drives.aio_config import AioConfig
    from deepnvme.drives.profiles import AnyPath

TESTED = "1.8.0"
"""Version of TorchRec that the tests ran with."""

__all__ = ["EmbeddingBagCollectionOnDisk"]

_DTYPES = {"FP32": torch.float32, "FP16": torch.float16}
"""By the ``data_type`` of a configuration: those of TorchRec's own collection."""


class EmbeddingBagCollectionOnDisk(nn.Module):
    """A ``torchrec.EmbeddingBagCollection`` whose rows are on a drive, in one table for each configuration.

    Results have the same bits. So have rows after steps of :class:`deepnvme.tables.RowOptimizer`, compared with torch's
    optimizer on TorchRec's bags with ``sparse=True``. ``commit()`` of that optimizer commits all tables together. State dicts
    have the names of TorchRec's, such as ``embedding_bags.users.weight``. For gradients, copies and state dicts see
    :class:`deepnvme.nn.EmbeddingOnDisk`: each of the :attr:`embedding_bags` is an ``EmbeddingBagOnDisk``.

    New tables get rows from ``init_fn`` of their configuration, which is called for some of the rows at a time.

    Args:
        tables: ``torchrec.EmbeddingBagConfig``, or objects with the attributes ``name``, ``num_embeddings``, ``embedding_dim``,
            ``feature_names`` and ``pooling`` ("sum" or "mean"), and optionally ``data_type`` and ``init_fn``.
        is_weighted: Whether features have a weight for each id. Pooling must be "sum" then.
        path: A directory, or several on different drives, for the directories of the tables, which are named after them. A
            table that is there is opened, others are created.
        optimizer: What will train the rows, as for :class:`deepnvme.nn.EmbeddingOnDisk`; None if they are not trained.
        memory_budget: Bytes of memory for the rows of all tables together, shared in proportion to their sizes; or "8GB", ...
        staging_bytes: Bytes of pinned memory through which rows are read and written, for all tables, shared equally.
        aio_config: Settings of the engine; None for the profile of the drive.

    Raises:
        ValueError: If two tables have one name, if there are none, for another pooling or ``data_type``; or as
            :class:`deepnvme.nn.EmbeddingOnDisk` raises.
        OSError: If the drive cannot be read or written. Tables that were created stay.
    """

    def __init__(
        self,
        tables: Sequence[Any],
        is_weighted: bool = False,
        *,
        path: AnyPath | Sequence[AnyPath],
        optimizer: OptimizerFactory | None = None,
        memory_budget: MemoryBudget = DEFAULT_MEMORY_BUDGET,
        staging_bytes: ByteCount = DEFAULT_STAGING_BYTES,
        aio_config: AioConfig | None = None,
    ) -> None:
        super().__init__()
        names = [table.name for table in tables]
        if not names or len(set(names)) < len(names):
            raise ValueError(f"tables must have different names, and there must be one, got {names}")
        self._tables, self._is_weighted = list(tables), is_weighted
        self._features = [list(table.feature_names) or [table.name] for table in tables]
        all_features = [name for features in self._features for name in features]
        self._keys = [
            f"{name}@{table.name}" if all_features.count(name) > 1 else name
            for table, features in zip(tables, self._features, strict=True)
            for name in features
        ]
        self._lengths = [table.embedding_dim for table, features in zip(tables, self._features, strict=True) for _ in features]
        budget, staging = budget_bytes(memory_budget, "memory_budget"), byte_count(staging_bytes, "staging_bytes")
        sizes = [table.num_embeddings * table.embedding_dim * _dtype_of(table).itemsize for table in tables]
        bags: dict[str, EmbeddingBagOnDisk] = {}
        try:
            for table, nbytes in zip(tables, sizes, strict=True):
                memory: TableMemory = {
                    "memory_budget": budget * nbytes // max(sum(sizes), 1),
                    "staging_bytes": staging // len(names),
                    "aio_config": aio_config,
                }
                mode: Any = str(getattr(table.pooling, "value", table.pooling)).lower()
                if is_weighted and mode != "sum":
                    raise ValueError(f"features with weights need the pooling 'sum', got {mode!r} for the table {table.name!r}")
                bags[table.name] = EmbeddingBagOnDisk(
                    table.num_embeddings, table.embedding_dim, path=[each / table.name for each in as_paths(path)], mode=mode,
                    include_last_offset=True, dtype=_dtype_of(table), optimizer=optimizer, values=_values_of(table), **memory,
                )  # fmt: skip
            self.embedding_bags = nn.ModuleDict(bags)
        except BaseException:
            for bag in bags.values():
                bag.table.close()
            raise

    def forward(self, features: Any) -> Any:
        """Return a ``KeyedTensor`` of the pooled rows, one key for each feature of each table. Blocks until the rows are read.

        Args:
            features: A ``KeyedJaggedTensor`` with ids of all features, on any device.

        Raises:
            TypeError: For anything else.
            ValueError: If the features have inverse indices (a batch size of their own for each feature).
            KeyError: If a feature is missing.
            IndexError, OSError: As :class:`deepnvme.nn.EmbeddingBagOnDisk` raises.
        """
        pooled = []
        for bag, jagged in self._inputs(features):
            weights = jagged.weights() if self._is_weighted else None
            pooled.append(bag(jagged.values(), jagged.offsets(), weights).float())
        keyed_tensor = sys.modules[type(features).__module__].KeyedTensor
        return keyed_tensor(keys=self._keys, values=torch.cat(pooled, dim=1), length_per_key=self._lengths)

    def prefetch(self, features: Any) -> None:
        """Start reading the rows that a later forward with these features needs; return at once. Errors are forward's."""
        for bag, jagged in self._inputs(features):
            bag.prefetch(jagged.values())

    def is_weighted(self) -> bool:
        """Return whether features have weights, as TorchRec's collection does."""
        return self._is_weighted

    def embedding_bag_configs(self) -> list[Any]:
        """Return the configurations of the tables, as TorchRec's collection does."""
        return self._tables

    def _inputs(self, features: Any) -> Iterator[tuple[Any, Any]]:
        """Yield each bag with the ``JaggedTensor`` of each of its features."""
        if not hasattr(features, "to_dict") or not hasattr(sys.modules[type(features).__module__], "KeyedTensor"):
            raise TypeError(
                f"features must be a KeyedJaggedTensor of TorchRec (tested with {TESTED}), got {type(features).__name__}"
            )
        if features.inverse_indices_or_none() is not None:
            raise ValueError("features with inverse indices (a batch size for each feature) are not supported")
        by_name = features.to_dict()
        for bag, names in zip(self.embedding_bags.values(), self._features, strict=True):
            for name in names:
                yield bag, by_name[name]


def _dtype_of(table: Any) -> torch.dtype:
    """Return the dtype of a table's rows: float32 without ``data_type``. Raises ValueError for types that are not trained."""
    name = getattr(table, "data_type", "FP32")
    name = getattr(name, "value", name)
    if name not in _DTYPES:
        raise ValueError(f"data_type of the table {table.name!r} must be FP32 or FP16, got {name}")
    return _DTYPES[name]


def _values_of(table: Any) -> Values | None:
    """Return the function that makes a new table's rows; None for the rows of torch's ``EmbeddingBag``."""
    init_fn = getattr(table, "init_fn", None)
    return None if init_fn is None else partial(_initial, init_fn, table.embedding_dim, _dtype_of(table))


def _initial(init_fn: Any, width: int, dtype: torch.dtype, begin: int, end: int) -> torch.Tensor:
    rows = torch.empty(end - begin, width, dtype=dtype)
    init_fn(rows)
    return rows
