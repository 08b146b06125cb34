"""A table as GraphBolt's Feature. DGL is not installed: what it calls is called here as it documents it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from deepnvme.integrations.graphbolt import TableFeature
from deepnvme.tables import Table


@pytest.fixture
def features() -> torch.Tensor:
    return torch.randn(100, 3, 4)


@pytest.fixture
def feature(features: torch.Tensor, drive: Path) -> TableFeature:
    return TableFeature(Table.from_tensor(drive / "features", features), {"source": "test"})


def test_read(feature: TableFeature, features: torch.Tensor) -> None:
    ids = torch.tensor([3, 99, 3])
    assert torch.equal(feature.read(ids), features[ids])
    assert torch.equal(feature.read(), features)
    with pytest.raises(IndexError):
        feature.read(torch.tensor([100]))


def test_read_async_as_graphbolts_fetcher_does(feature: TableFeature, features: torch.Tensor) -> None:
    ids = torch.tensor([0, 2])
    futures = list(feature.read_async(ids))
    assert len(futures) == feature.read_async_num_stages(ids.device)
    assert torch.equal(futures[-1].wait(), features[ids])


def test_what_it_is(feature: TableFeature) -> None:
    assert feature.size() == torch.Size((3, 4))
    assert feature.count() == 100
    assert feature.metadata() == {"source": "test"}
    assert feature.pin_memory_() is feature
    assert not feature.is_pinned()
    with pytest.raises(NotImplementedError, match=r"Table\.write"):
        feature.update(torch.zeros(3, 4), torch.tensor([0]))
