"""Layers in tiles against the layers that they replace."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from deepnvme.offload import TiledEmbedding, TiledLinear, tile_large_layers, untiled_state_dict


def tiled(layer: nn.Linear | nn.Embedding, rows: int) -> nn.Module:
    """A copy of a layer in tiles of at most so many rows."""
    model = nn.Sequential(copy.deepcopy(layer))
    assert tile_large_layers(model, rows * layer.weight[0].nbytes) == ["0"]
    return model[0]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 20, 52])
def test_a_tiled_linear_layer_is_the_layer(rows: int, bias: bool) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(37, 53, bias=bias, dtype=torch.float64)
    layer = tiled(linear, rows)
    assert isinstance(layer, TiledLinear)
    x = torch.randn(3, 5, 37, dtype=torch.float64, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    expected, found = linear(x), layer(y)
    torch.testing.assert_close(found, expected)
    expected.square().sum().backward()
    found.square().sum().backward()
    torch.testing.assert_close(y.grad, x.grad)
    for name, param in linear.named_parameters():
        torch.testing.assert_close(torch.cat([getattr(tile, name).grad for tile in layer.tiles]), param.grad)


@pytest.mark.parametrize("rows", [6, 14, 40])
def test_a_tiled_embedding_is_the_embedding(rows: int) -> None:
    torch.manual_seed(0)
    embedding = nn.Embedding(41, 6, padding_idx=2)
    layer = tiled(embedding, rows)
    assert isinstance(layer, TiledEmbedding)
    ids = torch.randint(0, 41, (4, 9))
    expected, found = embedding(ids), layer(ids)
    assert torch.equal(found, expected)
    expected.square().sum().backward()
    found.square().sum().backward()
    ours = torch.cat([param.grad if param.grad is not None else torch.zeros_like(param) for param in layer.parameters()])
    assert torch.equal(ours, embedding.weight.grad)
    with pytest.raises(IndexError, match="out of range"):
        layer(torch.tensor([41]))


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
    with pytest.raises(ValueError, match="has tiled layers already"):
        tile_large_layers(model, 16 * 4 * 10)


REFUSED: dict[str, Callable[[nn.Linear], object]] = {
    "parameters, buffers or modules that were added to it": lambda layer: layer.register_buffer("more", torch.ones(1)),
    "a forward of its own": lambda layer: setattr(layer, "forward", layer.forward),
    "hooks": lambda layer: layer.register_forward_hook(lambda *_: None),
    "gradients": lambda layer: layer(torch.ones(16)).sum().backward(),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_layer_that_tiles_would_change_is_refused(what: str) -> None:
    model = nn.Sequential(nn.Linear(16, 40))
    REFUSED[what](model[0])
    with pytest.raises(ValueError, match=f"0 has .*{what}.*, which tiles would lose"):
        tile_large_layers(model, 16 * 4 * 20)
