"""GraphBolt's ``Feature``: node or edge features in a table on the drive. DGL itself is not needed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from deepnvme._lazy import public_names
from deepnvme.tables import RowsFuture, Table

__all__ = ["TableFeature"]

__dir__ = public_names(__name__)


class _Rows:
    """A read under way, with the ``wait`` that GraphBolt's futures have."""

    def __init__(self, future: RowsFuture, device: torch.device) -> None:
        self._future, self._device = future, device

    def wait(self) -> torch.Tensor:
        """Return the rows, on the device of the ids. Blocks."""
        return self._future.result().to(self._device)


class TableFeature:
    """The rows of a table as a ``dgl.graphbolt.Feature``: it has the same methods, so that feature stores and caches take it.

    >>> store = gb.BasicFeatureStore({("node", None, "feat"): TableFeature(Table.open("/mnt/nvme/features.npy"))})

    Args:
        table: The features: ``table.row_shape`` for each node or edge.
        metadata: What :meth:`metadata` returns.
    """

    def __init__(self, table: Table, metadata: dict[str, Any] | None = None) -> None:
        self.table = table
        self._metadata = dict(metadata or {})

    def read(self, ids: torch.Tensor | None = None) -> torch.Tensor:
        """Return the features of ids, on their device; None for those of all, which then have to fit into memory. Blocks."""
        if ids is None:
            ids = torch.arange(self.table.rows)
        return self.table.read_async(ids).result().to(ids.device)

    def read_async(self, ids: torch.Tensor) -> Iterator[_Rows]:
        """Start reading the features of ids: yields once, a future whose ``wait()`` returns them."""
        yield _Rows(self.table.read_async(ids), ids.device)

    def read_async_num_stages(self, ids_device: torch.device) -> int:
        """Return 1: :meth:`read_async` yields once, whatever the device of the ids."""
        return 1

    def size(self) -> torch.Size:
        """Return the shape of one feature."""
        return torch.Size(self.table.row_shape)

    def count(self) -> int:
        """Return how many features there are."""
        return self.table.rows

    def metadata(self) -> dict[str, Any]:
        """Return the metadata that the feature was made with."""
        return self._metadata

    def update(self, value: torch.Tensor, ids: torch.Tensor | None = None) -> None:
        """Raise NotImplementedError: features are not trained. :meth:`Table.write` changes rows."""
        raise NotImplementedError("features on the drive are only read: change the rows of the table by Table.write")

    def pin_memory_(self) -> TableFeature:
        """Do nothing: no feature is in memory but for the table's cache."""
        return self

    def is_pinned(self) -> bool:
        """Return False: the rows are on the drive."""
        return False
