"""Streamed weights on a device: the bits of the model that is there as a whole."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from deepnvme.memory.tensor_bytes import flat_bytes
from deepnvme.model.quantization import dequantize, quantize
from deepnvme.safetensors import save_file
from deepnvme.store.data_file import DATA_NAME
from deepnvme.streaming import CorruptExtent, WeightStore, stream

from ..support.files import flip
from ..support.models import Calls

pytestmark = pytest.mark.gpu

WIDTH = 512


def model_on(device: torch.device, dtype: torch.dtype) -> Calls:
    torch.manual_seed(0)
    return Calls(*(nn.Linear(WIDTH, WIDTH, dtype=dtype) for _ in range(8))).to(device)


@pytest.fixture
def model(device: torch.device) -> Calls:
    return model_on(device, torch.bfloat16)


@pytest.fixture
def store(model: Calls, drive: Path) -> Iterator[WeightStore]:
    with WeightStore.build(model, drive / "store") as store:
        yield store


@pytest.mark.parametrize("prefetch", [0, 1, 2])
@pytest.mark.parametrize("budget", [0, 3 << 20])
def test_the_same_bits(model: Calls, store: WeightStore, device: torch.device, prefetch: int, budget: int) -> None:
    with torch.device("meta"):
        streamed = model_on(torch.device("meta"), torch.bfloat16)
    x = torch.randn(64, WIDTH, device=device, dtype=torch.bfloat16)
    with stream(streamed, store, device=device, prefetch=prefetch, memory_budget=budget) as streaming, torch.no_grad():
        for order in ([*range(8)], [*range(8)], [1, 1, 5, 0], [*range(8)] * 4):
            assert torch.equal(streamed(x, order), model(x, order))
        assert next(streamed.parameters()).device == device
        streaming.close(restore=True)
        assert torch.equal(streamed(x, range(8)), model(x, range(8)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_in_place_the_same_bits(model: Calls, device: torch.device, drive: Path, dtype: torch.dtype) -> None:
    """Also of weights that begin anywhere in the file, and of those that are converted."""
    save_file({name: weight.cpu() for name, weight in model.state_dict().items()}, drive / "model.safetensors")
    expected = model.to(dtype)
    x = torch.randn(64, WIDTH, device=device, dtype=dtype)
    with torch.device("meta"):
        streamed = model_on(torch.device("meta"), dtype)
    with stream(streamed, drive / "model.safetensors", device=device), torch.no_grad():
        for _ in range(2):
            assert torch.equal(streamed(x, range(8)), expected(x, range(8)))


def test_slow_kernels_are_not_overtaken_by_what_is_read(store: WeightStore, model: Calls, device: torch.device) -> None:
    """The host runs ahead of the device, and memory is handed out again before it is computed with."""
    streamed = copy.deepcopy(model)
    x = torch.randn(8192, WIDTH, device=device, dtype=torch.bfloat16)
    with stream(streamed, store, device=device, prefetch=1), torch.inference_mode():
        expected = model(x, range(8))
        for _ in range(5):
            torch.cuda._sleep(50_000_000)
            assert torch.equal(streamed(x, range(8)), expected)


@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_quantised_weights_are_dequantised_on_the_device(device: torch.device, drive: Path, scheme: Any) -> None:
    model = model_on(torch.device("cpu"), torch.float32)
    streamed = copy.deepcopy(model)
    with WeightStore.build(model, drive / "store", quantize=scheme) as store, torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2:
                dequantize(scheme, quantize(weight, scheme), weight)
        model.to(device)
        x = torch.randn(3, WIDTH, device=device)
        with stream(streamed, store, device=device):
            for _ in range(3):
                assert torch.equal(streamed(x, range(8)), model(x, range(8)))


def test_what_is_corrupt_is_named(store: WeightStore, model: Calls, device: torch.device, drive: Path) -> None:
    streamed = copy.deepcopy(model)
    path = drive / "store" / DATA_NAME
    flip(path, path.read_bytes().index(bytes(flat_bytes(model.parts[0].weight.cpu()).numpy())) + 5)
    x = torch.randn(3, WIDTH, device=device, dtype=torch.bfloat16)
    refused = pytest.raises(CorruptExtent, match=r"'parts\.0' .* expected CRC-32")
    with stream(streamed, store, device=device), torch.no_grad(), refused:
        streamed(x, range(8))
