"""OffloadedTraining with quantize: frozen weights are in fewer bits on the drive, and dequantised when their block is used."""

from __future__ import annotations

import contextlib
import copy
import gc
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from deepnvme.model.quantization import SCHEMES, Scheme, dequantize, is_worth_quantizing, quantize
from deepnvme.offload import OffloadedTraining

from ...support.engines import failing
from ...support.examples import examples
from ...support.offloaded_training import InMemory, assert_same_model, assert_same_values, train_both
from ...support.pinned_memory import pinned_bytes

WIDTH, RANK, BLOCKS, WORDS = 96, 4, 4, 80


class Adapted(nn.Linear):
    """A frozen linear layer beside the two small trained ones of LoRA."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.requires_grad_(False)
        self.down = nn.Linear(inputs, RANK, bias=False)
        self.up = nn.Linear(RANK, outputs, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.up(self.down(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.wide = Adapted(WIDTH, 2 * WIDTH)
        self.narrow = Adapted(2 * WIDTH, WIDTH)
        self.norm.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.narrow(nn.functional.gelu(self.wide(self.norm(x))))


class Model(nn.Module):
    """A frozen embedding tied to the head, so in memory; blocks with adapters; one that is frozen as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.blocks[2].requires_grad_(False)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embedding.weight
        self.embedding.requires_grad_(False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.roll(-1, 1).flatten())


def new(dtype: torch.dtype = torch.float32) -> Model:
    torch.manual_seed(0)
    return Model().to(dtype)


def batch(step: int) -> torch.Tensor:
    return torch.randint(0, WORDS, (8, 9), generator=torch.Generator().manual_seed(step))


def is_quantized(param: torch.Tensor, scheme: Scheme) -> bool:
    return not param.requires_grad and is_worth_quantizing(scheme, param.shape, param.dtype)


@torch.no_grad()
def dequantized(model: nn.Module, scheme: Scheme) -> nn.Module:
    """A copy of a model, whose frozen weights have the values that they are to have."""
    found = copy.deepcopy(model)
    for param in found.parameters():
        if is_quantized(param, scheme):
            value = torch.empty(param.shape, dtype=param.dtype)
            dequantize(scheme, quantize(param, scheme), value)
            assert not torch.equal(param, value)
            param.copy_(value)
    return found


def training_of(model: nn.Module, drive: Path, **options: Any) -> OffloadedTraining:
    given = {"memory_budget": 500_000, "lr": 1e-2, "blocks": ["blocks.*"], **options}
    return OffloadedTraining(model, torch.optim.AdamW, path=drive, **given)


@pytest.mark.parametrize(("budget", "activations"), [(0, "nvme"), (400_000, "memory")])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_training_has_the_bits_of_one_in_memory_with_dequantised_weights(
    drive: Path, scheme: Scheme, activations: str, budget: int
) -> None:
    model = new()
    expected = dequantized(model, scheme)
    reference = InMemory(expected)
    with training_of(model, drive, quantize=scheme, activations=activations, memory_budget=budget) as training:
        for step in range(3):
            train_both(training, reference, [batch(step)])
            with torch.no_grad():
                model(batch(step))
        training.close(restore=True)
    assert_same_values(model.state_dict(), reference.model.state_dict())


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("activations", ["memory", "nvme"])
@pytest.mark.parametrize("scheme", [None, "int8"])
def test_blocks_in_blocks_keep_frozen_parameters_for_the_rest_of_their_backward(
    drive: Path, scheme: Scheme | None, activations: str, micro_batches: int
) -> None:
    """A block's norm is needed when all of its gradients are there, and the block in it was used since."""
    model = new()
    expected = copy.deepcopy(model) if scheme is None else dequantized(model, scheme)
    options = {"activations": activations, "micro_batches": micro_batches}
    with (
        training_of(model, drive / "a", quantize=scheme, blocks=["blocks.*", "blocks.*.wide"], **options) as training,
        training_of(expected, drive / "b", **options) as reference,
    ):
        train_both(training, reference, map(batch, range(3)))


@pytest.mark.parametrize(("scheme", "bits"), [(None, 16), ("int8", 8), ("int4", 4.25)])
def test_a_step_reads_quantised_weights_and_writes_no_frozen_ones(drive: Path, scheme: Scheme | None, bits: float) -> None:
    width, count = 512, 6
    model = nn.Sequential(*(Adapted(width, width) for _ in range(count))).to(torch.bfloat16)
    trained = sum(each.nbytes for each in model.parameters() if each.requires_grad)
    frozen = count * width * width * bits / 8
    with OffloadedTraining(
        model, torch.optim.AdamW, path=drive, blocks=list(model), quantize=scheme, memory_budget=0, lr=1e-3
    ) as training:
        for _ in range(2):
            with training.micro_batch():
                model(torch.ones(4, width, dtype=torch.bfloat16)).square().mean().backward()
            training.step()
        report = training.report()
    assert report.bytes_written == 3 * trained  # parameters and two averages
    assert (2 - 3 / count) * frozen <= report.bytes_read <= 2.02 * frozen + 4 * trained + count * 4096


def test_packed_and_dequantised_weights_stay_within_the_budget(drive: Path) -> None:
    gc.collect()
    before = pinned_bytes()
    model = new()
    one = sum(padded_to_page(each.nbytes) for each in model.blocks[0].parameters())
    budget = 6 * one
    with training_of(model, drive, quantize="int8", memory_budget=budget) as training:
        pinned: list[int] = []
        for block in model.blocks:
            block.register_forward_hook(lambda *_: pinned.append(pinned_bytes() - before))
            block.narrow.up.register_full_backward_hook(lambda *_: pinned.append(pinned_bytes() - before))
        for step in range(3):
            training.step(batch(step))
        assert one < max(pinned) <= budget
    del training, model, block
    gc.collect()
    assert pinned_bytes() <= before


def padded_to_page(nbytes: int) -> int:
    return -(-nbytes // 4096) * 4096


def test_random_models_and_drives_that_fail_at_random(drive: Path) -> None:
    """Whatever is frozen, of whatever dtype, and however it is trained: the bits are those of the same training in memory."""
    for seed in range(examples(12)):
        dice = random.Random(seed)
        model = new()
        for module in [each for each in model.modules() if isinstance(each, Adapted | nn.Embedding | nn.LayerNorm)]:
            for param in module.parameters():
                param.requires_grad_(dice.random() < 0.4)
        model.blocks[0].wide.up.weight.requires_grad_(True)
        scheme = dice.choice([None, *SCHEMES])
        expected = copy.deepcopy(model) if scheme is None else dequantized(model, scheme)
        reference = InMemory(expected)
        losses = [reference.step(batch(step)) for step in range(4)]
        options = {
            "quantize": scheme,
            "blocks": dice.choice([["blocks.*"], ["blocks.*", "blocks.*.wide"], [], ["blocks.1.narrow", "blocks.3"], None]),
            "memory_budget": dice.choice([0, 0, 3_000_000, 20_000_000]),
            "activations": dice.choice(["memory", "nvme"]),
            "parameters": dice.choice(["nvme", "nvme", "memory"]),
        }
        with training_of(model, drive / str(seed), **options) as training:
            kept = training.state_dict()
            for step, loss in enumerate(losses):
                if dice.random() < 0.5:
                    failure = failing(dice.choice(["read", "write"]), dice.randrange(20), dice.choice([1, 2, 1000]))
                    with contextlib.suppress(OSError), failure:
                        training.step(batch(step))
                while training.steps == step:
                    found = training.step(batch(step))
                    assert found is not None
                    assert torch.equal(found, loss), (seed, step, options)
            assert_same_model(training, reference.model)
            training.load_state_dict(kept)
            assert torch.equal(training.step(batch(0)), losses[0]), (seed, options)  # type: ignore[arg-type]


# States


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_training_that_is_resumed_has_the_same_bits(drive: Path, tmp_path: Path, scheme: Scheme) -> None:
    """Also if the model that it is loaded into has other weights: they need not be quantised a second time."""
    reference = InMemory(dequantized(new(torch.bfloat16), scheme))
    with training_of(new(torch.bfloat16), drive, quantize=scheme) as training:
        train_both(training, reference, map(batch, range(2)))
        training.save(tmp_path / "last.pt")
    torch.manual_seed(1)
    with training_of(Model().to(torch.bfloat16), drive, quantize=scheme) as resumed:
        resumed.step(batch(9))
        resumed.load_state_dict(torch.load(tmp_path / "last.pt", mmap=True))
        train_both(resumed, reference, map(batch, range(2, 4)))


def test_a_state_keeps_its_values_and_is_written_once(drive: Path) -> None:
    model = new()
    expected = dequantized(model, "int8")
    with training_of(model, drive, quantize="int8") as training:
        first = training.state_dict()["model"]
        used = _bytes_on(drive)
        other = training.state_dict()["model"]
        assert _bytes_on(drive) == used
        state = training.state_dict()
        state["model"] = {name: value.clone() * 2 for name, value in state["model"].items()}
        training.load_state_dict(state)  # what is quantised is not of these values
        assert_same_values(first, expected.state_dict())
        assert_same_values(other, expected.state_dict())
        twice = copy.deepcopy(expected)
        with torch.no_grad():
            for param in twice.parameters():
                param.mul_(2)
        assert_same_model(training, dequantized_again(twice, "int8"))


def dequantized_again(model: nn.Module, scheme: Scheme) -> nn.Module:
    """As :func:`dequantized`, of values that may stay as they are."""
    with torch.no_grad():
        for param in model.parameters():
            if is_quantized(param, scheme):
                dequantize(scheme, quantize(param, scheme), param)
    return model


def _bytes_on(drive: Path) -> int:
    return sum(path.stat().st_blocks for path in drive.rglob("*") if path.is_file())


@pytest.mark.parametrize(("scheme", "other"), [("int8", None), ("int8", "int4"), (None, "int8")])
def test_a_state_can_be_loaded_with_another_scheme(drive: Path, scheme: Scheme | None, other: Scheme | None) -> None:
    model = new()
    expected = model if scheme is None else dequantized(model, scheme)
    expected = copy.deepcopy(expected) if other is None else dequantized(expected, other)
    with (
        training_of(model, drive / "a", quantize=scheme) as training,
        training_of(Model(), drive / "b", quantize=other) as loaded,
    ):
        state = training.state_dict()
        assert ("quantized" in state) == (scheme is not None)
        loaded.load_state_dict(state)
        assert_same_model(loaded, expected)


@pytest.mark.parametrize("name", ["blocks.1.wide.weight", "embedding.weight"])
def test_a_state_with_a_value_that_cannot_be_quantised_changes_nothing(drive: Path, name: str) -> None:
    model = new()
    reference = InMemory(dequantized(model, "int4"))
    with training_of(model, drive, quantize="int4") as training:
        train_both(training, reference, [batch(0)])
        state = training.state_dict()
        wrong = {each: value.clone() for each, value in state["model"].items()}
        wrong[name][3, 5] = math.inf
        with pytest.raises(ValueError, match=rf"'{name}' holds inf at \[3, 5\], and int4 takes finite values"):
            training.load_state_dict({**state, "model": wrong})
        assert training.steps == 1
        train_both(training, reference, map(batch, (1, 2)))


# The first values


def test_a_checkpoint_is_quantised_block_by_block(drive: Path, tmp_path: Path) -> None:
    torch.save(new().state_dict(), tmp_path / "weights.pt")
    reference = InMemory(dequantized(new(), "int4"))
    with torch.device("meta"):
        model = Model()
    assert model.head.weight is model.embedding.weight
    with training_of(model, drive, quantize="int4", checkpoint=tmp_path / "weights.pt") as training:
        train_both(training, reference, map(batch, range(3)))


def test_a_weight_whose_strides_are_not_a_new_tensor_s_keeps_them(drive: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 64))
    model[0].weight = nn.Parameter(torch.randn(64, 128).t(), requires_grad=False)
    expected = dequantized(model, "int8")
    stride = model[0].weight.stride()
    strides: list[tuple[int, ...]] = []
    model[0].register_forward_hook(lambda module, *_: strides.append(module.weight.stride()))  # before the block's own
    with OffloadedTraining(model, torch.optim.SGD, path=drive, blocks=["0", "1"], quantize="int8", lr=1e-2) as training:
        with torch.no_grad():
            assert torch.equal(model(torch.ones(2, 64)), expected(torch.ones(2, 64)))
        assert strides == [stride]
        assert_same_model(training, expected)


# Errors


@pytest.mark.parametrize("operation", ["read", "write"])
def test_loading_a_state_on_a_drive_that_fails_changes_nothing(drive: Path, operation: str) -> None:
    model = new()
    expected = dequantized(model, "int4")
    torch.manual_seed(1)
    other = dequantized(Model(), "int4")
    with training_of(model, drive, quantize="int4", memory_budget=0) as training:
        state = training.state_dict()
        wanted = {**state, "model": {name: value.clone() for name, value in other.state_dict().items()}}
        failed = 0
        for first in range(0, 100, 2):
            try:
                with failing(operation, first, count=1000):
                    training.load_state_dict(wanted)
            except OSError:
                failed += 1
                assert_same_model(training, expected)
            else:
                break
        assert failed > 2
        assert_same_model(training, dequantized_again(other, "int4"))
