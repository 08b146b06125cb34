"""GraphBolt's ``Feature`` interface for node or edge features in a table on the drive. DGL itself is not needed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from deepnvme._lazy import public_names
from deepnvme.tables import RowsFuture, Table

__all__ = ["TableFeature"]

__dir__ = public_names(__name__)


class _Rows:
    """Rows that are being read, with the ``wait`` method that GraphBolt's futures have."""

    def __init__(self, future: RowsFuture, device: torch.device) -> None:
        self._future, self._device = future, device

    def wait(self) -> torch.Tensor:
        """Return the rows, on the device of the ids. Blocks."""
        return self._future.result().to(self._device)


class TableFeature:
    """A table's rows as a ``dgl.graphbolt.Feature``. It has the same methods, so GraphBolt's feature stores and caches accept it.

    >>> store = gb.BasicFeatureStore({("node", None, "feat"): TableFeature(Table.open("/mnt/nvme/features.npy"))})

    Args:
        table: The features: one row, of shape ``table.row_shape``, for each node or edge.
        metadata: What :meth:`metadata` returns; None for an empty dict.
    """

    def __init__(self, table: Table, metadata: dict[str, Any] | None = None) -> None:
        self.table = table
        self._metadata = dict(metadata or {})

    def read(self, ids: torch.Tensor | None = None) -> torch.Tensor:
        """Return features, on the device of ``ids``. Blocks.

        Args:
            ids: Numbers of the nodes or edges; None for all of them, whose features must then fit into memory.
        """
        if ids is None:
            ids = torch.arange(self.table.rows)
        return self.table.read_async(ids).result().to(ids.device)

    def read_async(self, ids: torch.Tensor) -> Iterator[_Rows]:
        """Start reading the features with these ids. Yields one future, whose ``wait()`` returns them."""
        yield _Rows(self.table.read_async(ids), ids.device)

    def read_async_num_stages(self, ids_device: torch.device) -> int:
        """Return 1: :meth:`read_async` yields once, whatever the device of the ids."""
        return 1

    def size(self) -> torch.Size:
        """Return the shape of one feature."""
        return torch.Size(self.table.row_shape)

    def count(self) -> int:
        """Return the number of features."""
        return self.table.rows

    def metadata(self) -> dict[str, Any]:
        """Return the metadata that the feature was made with."""
        return self._metadata

    def update(self, value: torch.Tensor, ids: torch.Tensor | None = None) -> None:
        """Raise NotImplementedError, since features are not trained. To change rows, use :meth:`Table.write`."""
        raise NotImplementedError("features on the drive are only read: change the rows of the table by Table.write")

    def pin_memory_(self) -> TableFeature:
        """Do nothing, since features stay on the drive. Only the table's cache is in memory."""
        return self

    def is_pinned(self) -> bool:
        """Return False: the rows are on the drive."""
        return False
