"""OffloadedTraining of models with layers larger than the budget, in tiles: each comes and goes by itself."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from deepnvme.checkpoint.weight_locations import OpenFiles
from deepnvme.model.quantization import QuantizedLayout, dequantize, quantize
from deepnvme.offload import OffloadedTraining, tile_large_layers, untiled_state_dict
from deepnvme.offload.training.model_partition import partition_model
from deepnvme.safetensors import save_file

from ...support.offloaded_training import InMemory, assert_same_model, train_both
from ...support.pinned_memory import pinned_bytes
from ...support.torch_versions import shares_are_counted

WIDTH, HIDDEN, WORDS = 32, 384, 400
TILE = 96 * WIDTH * 4
"""Bytes of a tile: 96 rows of the embedding, the head and the wide layers, 8 of the narrow ones."""


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.wide = nn.Linear(WIDTH, HIDDEN)
        self.narrow = nn.Linear(HIDDEN, WIDTH, bias=False)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.narrow(nn.functional.gelu(self.wide(self.norm(x)))))


class Model(nn.Module):
    """A tied head has a bias of its own."""

    def __init__(self, tied: bool = False, checkpointed: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH, padding_idx=1)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS, bias=tied)
        if tied:
            self.head.weight = self.embedding.weight
        self.checkpointed = checkpointed

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.roll(-1, 1).flatten())


def tiled(tied: bool = False, checkpointed: bool = False) -> Model:
    torch.manual_seed(7)
    model = Model(tied, checkpointed)
    assert len(tile_large_layers(model, TILE)) == 6
    return model


def batch(step: int) -> torch.Tensor:
    return torch.randint(0, WORDS, (8, 9), generator=torch.Generator().manual_seed(step))


def training_of(model: nn.Module, drive: Path, **options: Any) -> OffloadedTraining:
    return OffloadedTraining(model, torch.optim.AdamW, path=drive, **{"memory_budget": 0, "lr": 1e-2, **options})


def train_and_evaluate_both(training: OffloadedTraining, reference: InMemory, steps: int = 3) -> None:
    for step in range(steps):
        train_both(training, reference, [batch(step)])
        with torch.no_grad():
            training.model.eval(), reference.model.eval()
            assert torch.equal(training.model(batch(99)), reference.model(batch(99)))
            training.model.train(), reference.model.train()


# Which blocks there are


@pytest.mark.parametrize("blocks", [None, ["layers.*"]])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_tiles_are_blocks_of_their_own(device: str, blocks: list[str] | None) -> None:
    with torch.device(device):
        model = tiled()
    partition = partition_model(model, blocks)
    names = {module: name for name, module in model.named_modules()}
    found = [names[module] for module in partition.modules]
    tiles = [name for name, module in model.named_modules() if ".tiles." in name]
    assert len(tiles) == 2 * 5 + 2 * (4 + 4)
    assert sorted(found) == sorted(["layers.0", "layers.1", *tiles])
    assert not partition.rest


def test_of_modules_no_tiles_are_blocks_but_those_given() -> None:
    model = tiled()
    given = [model.layers[0], model.head.tiles[1]]
    assert partition_model(model, given).modules == given


# The bits


@pytest.mark.parametrize(
    ("tied", "checkpointed", "activations", "micro_batches"),
    [
        (False, False, "memory", 1),
        (False, False, "nvme", 4),
        (False, True, "nvme", 1),
        (True, False, "nvme", 4),
        (True, True, "memory", 4),
    ],
)
def test_a_training_in_tiles_has_the_bits_of_one_in_memory(
    drive: Path, tied: bool, checkpointed: bool, activations: str, micro_batches: int
) -> None:
    model = tiled(tied, checkpointed)
    reference = InMemory(model, micro_batches=micro_batches)
    options = {"activations": activations, "activation_budget": 10_000, "micro_batches": micro_batches}
    with training_of(model, drive, **options) as training:
        train_and_evaluate_both(training, reference)


# Memory


@shares_are_counted
def test_tiles_and_their_gradients_are_in_memory_one_after_the_other(drive: Path) -> None:
    """The head with its gradient and states takes several times the budget, a tile of it with these a half."""
    gc.collect()
    before = pinned_bytes()
    tile = 2 * TILE
    budget = 10 * tile
    model = Large()
    assert tile_large_layers(model, tile)
    assert 4 * sum(param.nbytes for param in model.head.parameters()) > 4 * budget
    pinned, gradients = [], []

    def look(*_: object) -> None:
        pinned.append(pinned_bytes() - before)
        gradients.append(sum(param.grad.nbytes for param in model.parameters() if param.grad is not None))

    def hooked(module: nn.Module, inputs: object, output: torch.Tensor) -> None:
        look()
        if output.requires_grad:
            output.register_hook(look)

    with training_of(model, drive, micro_batches=2, memory_budget=budget) as training:
        for module in model.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                module.register_forward_hook(hooked)
        for step in range(2):
            training.step(batch(step))
    assert tile < max(pinned) <= budget
    assert tile <= max(gradients) <= 3 * tile


class Large(Model):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(5 * WORDS, WIDTH), nn.Linear(WIDTH, 5 * WORDS, bias=False)
        for layer in self.layers:
            layer.wide, layer.narrow = nn.Linear(WIDTH, 5 * HIDDEN), nn.Linear(5 * HIDDEN, WIDTH)


# First values, and states


def saved(state: dict[str, torch.Tensor], drive: Path, kind: str) -> Any:
    if kind == "safetensors":
        save_file(state, drive / "w.safetensors")
        return drive / "w.safetensors"
    torch.save(state, drive / "w.pt")
    return drive / "w.pt"


@pytest.mark.parametrize(("kind", "device", "tied"), [("safetensors", "meta", True), ("pt", "cpu", False)])
def test_a_tiled_model_begins_with_the_checkpoint_of_the_untiled_one(drive: Path, tied: bool, device: str, kind: str) -> None:
    torch.manual_seed(1)
    state = dict(Model(tied).state_dict())
    if tied and kind == "safetensors":
        del state["head.weight"]  # each weight is there once
    expected = Model(tied)
    expected.load_state_dict(state, strict=not tied)
    tile_large_layers(expected, TILE)
    with torch.device(device):
        model = tiled(tied)
    reference = InMemory(expected)
    with training_of(model, drive / "training", checkpoint=saved(state, drive, kind)) as training:
        assert_same_model(training, expected)
        train_and_evaluate_both(training, reference, steps=1)
        training.close(restore=True)
    found = untiled_state_dict(model)
    assert set(found) == set(Model(tied).state_dict())
    untiled = Model(tied)
    untiled.load_state_dict(found)
    torch.testing.assert_close(untiled.eval()(batch(3)), reference.model.eval()(batch(3)))


@pytest.mark.parametrize("kind", ["safetensors", "pt"])
def test_a_tile_reads_its_part_of_a_checkpoint_only(drive: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    read: list[int] = []
    original = OpenFiles.read

    def counted(files: OpenFiles, path: str, offset: int, out: torch.Tensor) -> Any:
        read.append(out.nbytes)
        return original(files, path, offset, out)

    path = saved(dict(Model().state_dict()), drive, kind)
    monkeypatch.setattr(OpenFiles, "read", counted)
    with torch.device("meta"):
        model = tiled()
    with training_of(model, drive / "training", checkpoint=path):
        assert sum(read) == sum(param.nbytes for param in model.parameters())
        assert max(read) <= TILE + 16 * WIDTH * 4  # the last tile has the rows that are left


def test_a_checkpoint_with_another_shape_than_a_tiled_layer_is_refused(drive: Path) -> None:
    state = {**Model().state_dict(), "head.weight": torch.zeros(WORDS + 1, WIDTH)}
    with pytest.raises(ValueError, match=r"1 difference\n  shape: 'head.weight' should be \[400, 32\], found \[401, 32\]"):
        training_of(tiled(), drive / "training", checkpoint=saved(state, drive, "pt"))


@pytest.mark.parametrize("tied", [False, True])
def test_a_tiled_model_on_meta_gets_values_of_the_usual_size(drive: Path, tied: bool) -> None:
    with torch.device("meta"):
        model = tiled(tied)
    torch.manual_seed(0)
    with training_of(model, drive) as training:
        found = untiled_state_dict(model, training.state_dict()["model"])
        assert not found["embedding.weight"][1].any()  # padding_idx
        assert 0.95 < found["embedding.weight"].std() < 1.05
        bound = 1 / WIDTH**0.5
        assert 0.95 * bound < found["layers.0.wide.weight"].abs().max() <= bound
        assert (found["head.weight"] is found["embedding.weight"]) == tied
        training.step(batch(0))


def test_a_tiled_training_that_is_resumed_has_the_same_bits(drive: Path) -> None:
    model = tiled(tied=True)
    reference = InMemory(model)
    with training_of(model, drive / "first") as training:
        train_and_evaluate_both(training, reference, steps=2)
        training.save(drive / "last.pt")
        found = untiled_state_dict(model, training.state_dict()["model"])
        expected = untiled_state_dict(reference.model)
        assert list(found) == list(expected)
        assert all(torch.equal(found[name], value) for name, value in expected.items())
    with training_of(tiled(tied=True), drive / "second") as training:
        training.load_state_dict(torch.load(drive / "last.pt", mmap=True))
        assert training.steps == 2
        train_and_evaluate_both(training, reference)


@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_frozen_weights_of_tiles_may_be_quantised(drive: Path, scheme: Any) -> None:
    """As those of the whole layer in int8, whose scales are one for each row."""

    def new() -> Model:
        torch.manual_seed(7)
        model = Model()
        assert tile_large_layers(model, 4 * TILE) == ["embedding", "head"]  # smaller tiles are not quantised
        for name, param in model.named_parameters():
            param.requires_grad_(".tiles." not in name)
        return model

    model = new()
    whole = untiled_state_dict(model)["head.weight"].clone()
    with training_of(model, drive / "training", quantize=scheme) as training:
        dequantised = training.state_dict()["model"]
        expected = new()
        expected.load_state_dict(dequantised)
        train_and_evaluate_both(training, InMemory(expected))
        found = untiled_state_dict(model, dequantised)["head.weight"]
        assert not torch.equal(found, whole)
        if scheme == "int8":
            stored = torch.empty(QuantizedLayout.of(scheme, whole.shape).nbytes, dtype=torch.uint8)
            quantize(whole, scheme, stored)
            dequantize(scheme, stored, whole)
            assert torch.equal(found, whole)
