"""Which modules OffloadedTraining makes its blocks, if it finds them, is given names, or modules, some of them nested."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from deepnvme.offload.training import OffloadedTraining
from deepnvme.offload.training.model_partition import partition_model

from ...support.offloaded_training import InMemory, train_both

WIDTH, WORDS = 64, 4200
"""An embedding of these is more than 1 MiB: a block."""


class Layer(nn.Module):
    """Uses a parameter of its own before and after its modules."""

    def __init__(self, experts: int = 2) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.norm = nn.LayerNorm(WIDTH)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(experts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.norm(x * self.scale)
        for expert in self.experts:
            inner = nn.functional.gelu(expert(inner))
        return x + inner * self.scale


class Model(nn.Module):
    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), ids.roll(-1, 1).flatten())


def batch(step: int) -> torch.Tensor:
    return torch.randint(0, WORDS, (4, 9), generator=torch.Generator().manual_seed(step))


def assert_trains_as_in_memory(model: nn.Module, drive: Path, **options: Any) -> None:
    reference = InMemory(model)
    options = {"memory_budget": 0, "lr": 1e-2, **options}
    with OffloadedTraining(model, torch.optim.AdamW, path=drive, **options) as training:
        train_both(training, reference, map(batch, range(3)))


def names_of(model: nn.Module, blocks: Any = None) -> dict[str, set[str]]:
    """The names of the parameters of each block, and those that stay in memory."""
    partition = partition_model(model, blocks)
    modules = {module: name for name, module in model.named_modules()}
    params = {param: name for name, param in model.named_parameters()}
    found = [{params[each] for each in some} for some in (*partition.params, partition.rest)]
    assert sum(map(len, found)) == len(params)
    return dict(zip([*(modules[each] for each in partition.modules), "rest"], found, strict=True))


def layer(index: int, *parts: str) -> set[str]:
    found = {name for name, _ in Model().named_parameters() if name.startswith(f"layers.{index}.")}
    return {name for name in found if not name.startswith(parts)} if parts else found


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_layers_and_what_is_large_beside_them_are_found(device: str) -> None:
    with torch.device(device):
        model = Model()
    assert names_of(model) == {
        "embedding": {"embedding.weight"},
        **{f"layers.{index}": layer(index) for index in range(3)},
        "head": {"head.weight"},
        "rest": {"norm.weight", "norm.bias"},
    }


def test_what_is_tied_stays_in_memory() -> None:
    found = names_of(Model(tied=True))
    assert list(found) == ["layers.0", "layers.1", "layers.2", "rest"]
    assert found["rest"] == {"embedding.weight", "norm.weight", "norm.bias"}


def test_a_pattern_names_blocks_beside_those_that_are_found() -> None:
    found = names_of(Model(), ["layers.*.experts.1"])
    assert found["layers.1"] == layer(1, "layers.1.experts.1")
    assert found["layers.1.experts.1"] == {"layers.1.experts.1.weight", "layers.1.experts.1.bias"}
    assert "embedding" in found
    assert "norm" in names_of(Model(), ["norm"])


def test_of_modules_no_others_are_blocks() -> None:
    model = Model()
    found = names_of(model, list(model.layers))
    assert list(found) == ["layers.0", "layers.1", "layers.2", "rest"]
    assert found["rest"] == {"embedding.weight", "norm.weight", "norm.bias", "head.weight"}
    assert names_of(model, [])["rest"] == {name for name, _ in model.named_parameters()}


def test_what_two_blocks_use_stays_in_memory() -> None:
    model = Model()
    model.layers[2].norm = model.layers[0].norm
    model.layers[1].experts[0].bias = model.layers[1].experts[1].bias
    for blocks in (None, list(model.layers)):
        found = names_of(model, blocks)
        assert {"layers.0.norm.weight", "layers.0.norm.bias"} <= found["rest"]
        assert "layers.1.experts.0.bias" in found["layers.1"]
    assert "layers.1.experts.0.bias" in names_of(model, ["layers.1.experts.*"])["rest"]


@pytest.mark.parametrize(
    ("blocks", "error", "message"),
    [
        (["layer.*"], ValueError, "'layer.*' is no module that has weights"),
        (["layers"], ValueError, "is a ModuleList, whose forward nobody calls"),
        (lambda model: [model.layers], ValueError, "is a ModuleList, whose forward nobody calls"),
        (lambda model: [model.norm, nn.Linear(1, 1)], ValueError, "blocks must be modules of the model"),
        (lambda model: [model.norm, "layers.*"], ValueError, "and not both, got 'layers.*'"),
    ],
)
def test_what_cannot_be_blocks(
    drive: Path, blocks: list[Any] | Callable[[Model], list[Any]], error: type[Exception], message: str
) -> None:
    model = Model()
    with pytest.raises(error, match=message.replace("*", r"\*")):
        OffloadedTraining(model, torch.optim.SGD, path=drive, blocks=blocks(model) if callable(blocks) else blocks)
    assert not list(drive.iterdir())


@pytest.mark.parametrize("blocks", [None, ["layers.*.norm", "layers.*.experts.0", "norm"]], ids=str)
@pytest.mark.parametrize("tied", [False, True])
def test_found_and_nested_blocks_train_as_in_memory(drive: Path, blocks: list[str] | None, tied: bool) -> None:
    assert_trains_as_in_memory(Model(tied), drive, blocks=blocks)


def test_a_parameter_that_is_used_without_its_module_is_an_error(drive: Path) -> None:
    class Functional(Model):
        """Ties its head to its embedding, and says so nowhere."""

        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Identity()

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.norm(self.embedding(ids))
            return nn.functional.cross_entropy((x @ self.embedding.weight.t()).flatten(0, 1), ids.flatten())

    model = Functional()
    with OffloadedTraining(model, torch.optim.AdamW, path=drive) as training:
        with pytest.raises(RuntimeError, match=r"seen in the shape \(64, 4200\), was used outside of the forward of its block"):
            training.step(batch(0))
        assert training.steps == 0
    assert_trains_as_in_memory(Functional(), drive, blocks=list(model.layers)[:0])


def test_a_block_larger_than_what_is_stepped_at_a_time_gives_the_same_bits(tmp_path: Path) -> None:
    """A weight of more elements than that is stepped in pieces, whose states are one tensor in the state_dict."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1500, 1600), nn.GELU(), nn.Linear(1600, 8))
    in_memory = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(in_memory.parameters(), lr=1e-2, fused=True)
    x = torch.randn(4, 1500)
    given = {"blocks": ["0", "2"], "memory_budget": 0, "lr": 1e-2, "fused": True}
    with OffloadedTraining(model, torch.optim.AdamW, path=tmp_path, **given) as training:
        for _ in range(3):
            with training.micro_batch():
                model(x).square().mean().backward()
            training.step()
            in_memory(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        state = training.state_dict()
        for name, param in in_memory.named_parameters():
            assert torch.equal(state["model"][name], param)
            assert torch.equal(state["optimizer"]["state"][name]["exp_avg"], optimizer.state[param]["exp_avg"])
