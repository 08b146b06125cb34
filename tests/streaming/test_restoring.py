"""A model whose stream was closed has its own weights again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from deepnvme.streaming import WeightStore, stream

from ..support.models import WIDTH


def made() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)), nn.LayerNorm(WIDTH))


@pytest.fixture
def store(drive: Path) -> Iterator[WeightStore]:
    with WeightStore.build(made(), drive / "store", blocks=["0", "1", "2", "3"]) as store:
        yield store


def test_a_restored_model_requires_grad_as_before(store: WeightStore) -> None:
    model = made()
    for weight in model[1].parameters():
        weight.requires_grad_(False)
    with stream(model, store) as streaming:
        assert not any(weight.requires_grad for weight in model.parameters())
        streaming.close(restore=True)
    assert [weight.requires_grad for weight in model.parameters()] == [True, True, False, False, *[True] * 6]
