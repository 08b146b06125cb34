"""Layers in tiles against the layers that they replace."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from deepnvme.offload import TiledEmbedding, TiledLinear, tile_large_layers, untiled_state_dict


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("out_splits", "in_splits"), [(1, 1), (3, 1), (1, 4), (5, 2)])
def test_a_tiled_linear_layer_is_the_layer(out_splits: int, in_splits: int, bias: bool) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(37, 53, bias=bias, dtype=torch.float64)
    tiled = TiledLinear.from_linear(copy.deepcopy(linear), out_splits=out_splits, in_splits=in_splits)
    x = torch.randn(3, 5, 37, dtype=torch.float64, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    expected, found = linear(x), tiled(y)
    torch.testing.assert_close(found, expected)
    expected.square().sum().backward()
    found.square().sum().backward()
    torch.testing.assert_close(y.grad, x.grad)
    numel = sum(param.numel() for param in linear.parameters())
    assert sum(param.numel() for param in tiled.parameters()) == numel
    ours = torch.cat([param.grad.flatten() for param in tiled.parameters() if param.grad is not None]).sort().values
    torch.testing.assert_close(ours, torch.cat([each.grad.flatten() for each in linear.parameters()]).sort().values)


@pytest.mark.parametrize("splits", [1, 3, 7])
def test_a_tiled_embedding_is_the_embedding(splits: int) -> None:
    torch.manual_seed(0)
    embedding = nn.Embedding(41, 6, padding_idx=2)
    tiled = TiledEmbedding.from_embedding(copy.deepcopy(embedding), splits=splits)
    ids = torch.randint(0, 41, (4, 9))
    expected, found = embedding(ids), tiled(ids)
    assert torch.equal(found, expected)
    expected.square().sum().backward()
    found.square().sum().backward()
    ours = torch.cat([param.grad if param.grad is not None else torch.zeros_like(param) for param in tiled.parameters()])
    assert torch.equal(ours, embedding.weight.grad)
    with pytest.raises(IndexError, match="out of range"):
        tiled(torch.tensor([41]))


def test_large_layers_are_tiled_and_their_state_is_that_of_the_model() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 16), nn.Linear(16, 40))
    expected, state = model(torch.arange(50)), copy.deepcopy(model.state_dict())
    assert sorted(tile_large_layers(model, 16 * 4 * 20)) == ["0", "2"]
    assert all(param.nbytes <= 16 * 4 * 20 for param in model.parameters())
    torch.testing.assert_close(model(torch.arange(50)), expected)
    found = untiled_state_dict(model)
    assert {name: value.shape for name, value in found.items()} == {name: value.shape for name, value in state.items()}
    assert all(torch.equal(found[name], value) for name, value in state.items())
