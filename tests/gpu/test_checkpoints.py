"""Checkpoints of tensors on a device: as the stream leaves them, whole, and loaded again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import deepnvme
from deepnvme.swap import BufferPool

pytestmark = pytest.mark.gpu

MIB = 1 << 20


def state(device: torch.device) -> dict[str, torch.Tensor]:
    sizes = (1, 1000, 4 * MIB, 40 * MIB + 3)
    on_device = {str(size): torch.arange(size, device=device).to(torch.uint8) for size in sizes}
    return {**on_device, "host": torch.arange(5 * MIB).to(torch.uint8)}


@pytest.mark.parametrize("budget", [64 * MIB, 16 * MIB])
def test_a_state_is_saved_as_the_stream_leaves_it(path: Path, device: torch.device, budget: int) -> None:
    tensors = state(device)
    torch.cuda.synchronize(device)
    expected = {name: (tensor + 1).cpu() for name, tensor in tensors.items()}
    with torch.cuda.stream(torch.cuda.Stream(device)):
        torch.cuda._sleep(200_000_000)
        for tensor in tensors.values():
            tensor.add_(1)
        future = deepnvme.async_save(tensors, path, pool=BufferPool(budget))
        for tensor in tensors.values():
            tensor.zero_()
    future.result(30)
    found = torch.load(path, map_location="cpu")
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_what_is_saved_is_loaded_where_it_was(path: Path, device: torch.device) -> None:
    tensors = state(device)
    deepnvme.save(tensors, path)
    found = deepnvme.load(path)
    for name, tensor in tensors.items():
        assert found[name].device == tensor.device
        assert torch.equal(found[name], tensor)
