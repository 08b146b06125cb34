"""What EmbeddingBagCollectionOnDisk sees of TorchRec's classes, without TorchRec."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch


@dataclass
class KeyedTensor:
    keys: Sequence[str]
    values: torch.Tensor
    length_per_key: Sequence[int]


class KeyedJaggedTensor:
    """Ids of each feature, with as many ids as ``lengths`` says for each sample, and perhaps with weights."""

    def __init__(
        self, features: dict[str, tuple[torch.Tensor, torch.Tensor]], weighted: bool = False, inverse: Any = None
    ) -> None:
        self._features, self._weighted, self._inverse = features, weighted, inverse

    def inverse_indices_or_none(self) -> Any:
        return self._inverse

    def to_dict(self) -> dict[str, Any]:
        return {name: self._jagged(ids, lengths) for name, (ids, lengths) in self._features.items()}

    def _jagged(self, ids: torch.Tensor, lengths: torch.Tensor) -> Any:
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        weights = (ids % 7 + 1).float() / 3 if self._weighted else None
        return SimpleNamespace(values=lambda: ids, offsets=lambda: offsets, weights=lambda: weights)
