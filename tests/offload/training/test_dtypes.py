"""OffloadedTraining of models with parameters and buffers in several dtypes: the bits of training in memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from deepnvme.model.quantization import SCHEMES, Scheme, dequantize, is_worth_quantizing, quantize
from deepnvme.offload import OffloadedTraining

from ...support.offloaded_training import InMemory, assert_same_values, train_both

WIDTH, WORDS, LAYERS = 64, 70, 3
EPS = 1e-4  # 1e-8 is 0 in float16, and steps without master weights then give NaN, in memory as well


class Block(nn.Module):
    """Norms in float32, linear layers in bfloat16, a gate in float16, a scale in float64, a count and a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.wide = nn.Linear(WIDTH, 2 * WIDTH, dtype=torch.bfloat16)
        self.narrow = nn.Linear(2 * WIDTH, WIDTH, dtype=torch.bfloat16)
        self.gate = nn.Linear(WIDTH, WIDTH, dtype=torch.float16)
        self.scale = nn.Parameter(torch.randn(WIDTH, dtype=torch.float64))
        self.table = nn.Parameter(torch.arange(WIDTH).roll(3), requires_grad=False)  # an integer parameter
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("kept", torch.arange(WIDTH) % 5 != 0)
        self.register_buffer("sums", torch.zeros(WIDTH, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        normed = self.norm(x)
        self.sums += normed.detach().double().sum((0, 1))
        y = self.narrow(nn.functional.gelu(self.wide(normed.bfloat16()))).float()
        gate = torch.sigmoid(self.gate(normed.half()).float())
        scaled = (y * gate).double() * self.scale
        return x + (scaled * self.kept)[..., self.table].float()


class Model(nn.Module):
    """Beside its blocks are a bfloat16 embedding, and a float64 head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH, dtype=torch.bfloat16)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, WORDS, dtype=torch.float64)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids).float()
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x.double()).flatten(0, 1), ids.roll(-1, 1).flatten())


def new() -> Model:
    torch.manual_seed(0)
    return Model()


def batch(step: int) -> torch.Tensor:
    return torch.randint(0, WORDS, (8, 9), generator=torch.Generator().manual_seed(step))


def in_memory(model: nn.Module, masters: bool) -> InMemory:
    return InMemory(model, master_weights=masters, eps=EPS)


def trains_as_in_memory(model: nn.Module, reference: InMemory, drive: Path, **options: Any) -> None:
    given = {"memory_budget": 0, "blocks": ["blocks.*"], "lr": 1e-2, "eps": EPS, **options}
    with OffloadedTraining(model, torch.optim.AdamW, path=drive, **given) as training:
        train_both(training, reference, map(batch, range(4)))
        training.close(restore=True)
    assert_same_values(model.state_dict(), reference.model.state_dict())


@pytest.mark.parametrize("activations", ["memory", "nvme"])
@pytest.mark.parametrize("masters", [False, True])
def test_all_dtypes_of_a_block_train_as_in_memory(drive: Path, masters: bool, activations: str) -> None:
    model = new()
    trains_as_in_memory(model, in_memory(model, masters), drive, master_weights=masters, activations=activations)


def freeze_linear(block: Block) -> None:
    """As for LoRA: what is large is frozen, in bfloat16 and float16; norms in float32 and the scale in float64 are trained."""
    block.wide.requires_grad_(False)
    block.narrow.requires_grad_(False)
    block.gate.weight.requires_grad_(False)


def freeze_small(block: Block) -> None:
    block.norm.requires_grad_(False)
    block.scale.requires_grad_(False)
    block.gate.bias.requires_grad_(False)


def freeze_all_but_one(block: Block) -> None:
    block.requires_grad_(False)
    block.norm.bias.requires_grad_(True)


@torch.no_grad()
def dequantize_frozen(model: nn.Module, scheme: Scheme) -> int:
    """Give the frozen weights of a model the values that they are to have, and return of how many types these are."""
    found = set()
    for param in model.parameters():
        if not param.requires_grad and is_worth_quantizing(scheme, param.shape, param.dtype):
            dequantize(scheme, quantize(param, scheme), param)
            found.add(param.dtype)
    return len(found)


@pytest.mark.parametrize("masters", [False, True])
@pytest.mark.parametrize("scheme", [None, *SCHEMES])
@pytest.mark.parametrize("freeze", [freeze_linear, freeze_small, freeze_all_but_one])
def test_frozen_and_trained_parameters_of_a_block_have_different_dtypes(
    drive: Path, freeze: Callable[[Block], None], scheme: Scheme | None, masters: bool
) -> None:
    model = new()
    for block in model.blocks:
        freeze(block)
    reference = in_memory(model, masters)
    if scheme is not None:
        assert dequantize_frozen(reference.model, scheme) == (0 if freeze is freeze_small else 2)
    trains_as_in_memory(model, reference, drive, quantize=scheme, master_weights=masters)
