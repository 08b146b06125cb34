"""Pinned host memory is registered with CUDA, so that copies to and from the device are asynchronous; and it is read in place."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

import deepnvme

from ..support.memory import pattern

# Containers for GPUs seldom allow much to be locked, and it is not what is tested here.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:mlock of")]

SIZE = 32 << 20
WHILE = 1_000_000_000  # cycles, about half a second
Pinned = Callable[[], torch.Tensor]


@pytest.fixture(params=["empty_pinned", "new_cpu_locked_tensor"])
def pinned(request: pytest.FixtureRequest, engine: deepnvme.Engine, op: ModuleType, device: torch.device) -> Pinned:
    """Makes a tensor of SIZE bytes, after torch has begun to use CUDA."""
    torch.empty(1, device=device)
    if request.param == "empty_pinned":
        return lambda: engine.empty_pinned(SIZE, torch.uint8)
    return lambda: op.aio_handle().new_cpu_locked_tensor(SIZE, torch.empty(0, dtype=torch.uint8))  # type: ignore[no-any-return]


def test_torch_knows_that_it_is_pinned(pinned: Pinned) -> None:
    tensor = pinned()
    assert tensor.is_pinned()
    assert tensor[1000:].is_pinned()


@pytest.mark.parametrize("to_the_device", [True, False])
def test_a_copy_is_asynchronous(pinned: Pinned, device: torch.device, to_the_device: bool) -> None:
    host, on_device, stream = pinned(), torch.zeros(SIZE, dtype=torch.uint8, device=device), torch.cuda.Stream(device)
    source, target = (host, on_device) if to_the_device else (on_device, host)
    source.fill_(3)
    torch.cuda.synchronize(device)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(WHILE)
        slept = stream.record_event()
        target.copy_(source, non_blocking=True)
        assert not slept.query()
    stream.synchronize()
    assert target.eq(3).all()


def test_from_the_file_by_way_of_pinned_memory_to_the_device_and_back(
    pinned: Pinned, engine: deepnvme.Engine, device: torch.device, drive: Path
) -> None:
    content, host = pattern(1 << 20) * 32, pinned()
    (drive / "file").write_bytes(content)
    engine.read(host, drive / "file").result()
    on_device = host.to(device, non_blocking=True)
    torch.cuda.synchronize(device)
    host.zero_()
    host.copy_(on_device, non_blocking=True)
    torch.cuda.synchronize(device)
    engine.write(host, drive / "copy").result()
    assert (drive / "copy").read_bytes() == content
    assert engine.stats().bytes_zero_copy == 2 * SIZE
