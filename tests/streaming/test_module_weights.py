"""Weights in the places that a model has for them, and what happens to them there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from deepnvme.model.structure import UNBLOCKED_EXTENT
from deepnvme.streaming import WeightStore
from deepnvme.streaming.module_weights import ModuleWeights

from ..support.models import WIDTH, blocks_of, entangled

CPU = torch.device("cpu")


class World:
    """A model that is one block, and its weights in memory and not."""

    def __init__(self, model: nn.Module, directory: Path) -> None:
        self.model: Any = model
        self.wanted = {name: weight.clone() for name, weight in model.state_dict().items()}
        self.store = WeightStore.build(model, directory, blocks=blocks_of(model))
        self.weights = ModuleWeights(model, self.store, self.store.extents, CPU)
        for extent in self.store.extents.keys() - {UNBLOCKED_EXTENT}:  # which is put there once
            self.weights.remove(extent)

    def put(self, extent: str) -> None:
        memory = torch.empty(self.store.extents[extent].nbytes, dtype=torch.uint8)
        self.weights.put(extent, self.store.read(extent, memory).result())


@pytest.fixture
def world(drive: Path) -> Iterator[World]:
    torch.manual_seed(0)
    world = World(nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)]), drive / "store")
    yield world
    world.store.close()


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: layer.weight.mul_(2),
        lambda layer: layer.weight.detach().zero_(),
        lambda layer: setattr(layer, "weight", nn.Parameter(layer.weight.clone())),
        lambda layer: delattr(layer, "weight"),
        lambda layer: layer.double(),
        lambda layer: setattr(layer.weight, "data", layer.weight.data.clone()),
    ],
    ids=["in place", "through a view", "replaced", "deleted", "cast", "data"],
)
def test_a_weight_that_is_changed_where_it_is_is_named(world: World, change: Callable[[Any], Any]) -> None:
    world.put("0")
    assert world.weights.changed("0") == []
    with torch.no_grad():
        change(world.model[0])
    assert "0.weight" in world.weights.changed("0")


def test_one_that_somebody_puts_in_place_of_a_placeholder_is_named(world: World) -> None:
    assert world.weights.replaced("0") == []
    placeholder = world.model[0].bias
    world.model[0].bias = nn.Parameter(torch.zeros(WIDTH))
    assert world.weights.replaced("0") == ["0.bias"]
    world.model[0].bias = placeholder
    assert world.weights.replaced("0") == []


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_weights_are_views_of_what_was_read_and_tell_of_changes_in_every_mode(world: World, mode: Any) -> None:
    memory = torch.zeros(world.store.extents["0"].nbytes, dtype=torch.uint8)
    with mode():
        world.weights.put("0", world.store.read("0", memory).result())
    weight = world.model[0].weight
    assert isinstance(weight, nn.Parameter)
    assert not weight.requires_grad
    assert memory.data_ptr() <= weight.data_ptr() < memory.data_ptr() + memory.numel()
    assert weight.equal(world.wanted["0.weight"])
    assert not weight.is_inference()
    with mode():
        nn.functional.linear(torch.zeros(1, WIDTH), weight)
    assert world.weights.changed("0") == []


def test_buffers_stay_buffers(world: World) -> None:
    world.put(UNBLOCKED_EXTENT)
    norm = world.model[1]
    assert not isinstance(norm._buffers["running_mean"], nn.Parameter)
    assert norm.num_batches_tracked.dtype == torch.int64
    assert norm.running_var.equal(torch.ones(WIDTH))


def test_one_weight_with_several_places_is_one_in_all_of_them(drive: Path) -> None:
    world = World(entangled(), drive / "store")
    for extent in world.store.extents:
        world.put(extent)
    parts = world.model.parts
    assert parts[0].weight is parts[1].weight
    assert parts[0].bias is parts[3].bias
    assert parts[2].inner is parts[0] is parts[6]
    found = world.model.state_dict()
    assert found.keys() == world.wanted.keys()
    assert all(torch.equal(found[name], weight) for name, weight in world.wanted.items())
    world.store.close()
