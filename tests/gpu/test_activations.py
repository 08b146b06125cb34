"""save_on_disk of tensors on a device: the same bits, within a budget of the device's memory, whatever stream computes."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from deepnvme.offload import save_on_disk

pytestmark = pytest.mark.gpu

MIB = 1 << 20


@pytest.fixture
def activations(drive: Path) -> Iterator[save_on_disk]:
    with contextlib.closing(save_on_disk(drive / "activations", memory_budget=8 * MIB, min_bytes=1024)) as made:
        yield made


def model(device: torch.device, width: int = 512) -> nn.Sequential:
    torch.manual_seed(0)
    layers = (
        nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1)) for _ in range(6)
    )
    return nn.Sequential(*layers).to(device)


def trained(
    net: nn.Sequential, device: torch.device, context: Any, autocast: bool = False, batch: int = 1024
) -> list[torch.Tensor]:
    """The losses, and the weights after three steps."""
    width = net[0][0].in_features  # type: ignore[index]
    net = copy.deepcopy(net)
    optimizer = torch.optim.SGD(net.parameters(), 1e-2)
    torch.manual_seed(1)
    losses = []
    for _ in range(3):
        x = torch.randn(batch, width, device=device)
        with context, torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            loss = net(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [*losses, *(weight.detach() for weight in net.parameters())]


@pytest.mark.parametrize("autocast", [False, True])
def test_the_same_bits_as_in_memory(device: torch.device, activations: save_on_disk, autocast: bool) -> None:
    net = model(device)
    ours = trained(net, device, activations, autocast)
    report = activations.report()
    assert all(map(torch.equal, ours, trained(net, device, contextlib.nullcontext(), autocast)))
    assert report.bytes_written > 0
    assert report.bytes_read > 0


def test_memory_of_the_device_stays_within_the_budget(device: torch.device, activations: save_on_disk) -> None:
    def peak(context: Any) -> int:
        torch.cuda.reset_peak_memory_stats(device)
        trained(net, device, context, batch=4096)
        return torch.cuda.max_memory_allocated(device)

    net = model(device, width=128)  # little of the memory is for weights and gradients
    assert peak(activations) < peak(contextlib.nullcontext()) - activations.report().saved_bytes // 2


def test_a_forward_on_a_stream_of_its_own(device: torch.device, activations: save_on_disk) -> None:
    net = model(device)

    def gradients(context: Any) -> list[torch.Tensor]:
        net.zero_grad()
        torch.manual_seed(2)
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            x = torch.ones(1024, 512, device=device)
            with context:
                loss = net(x).square().mean()
        torch.cuda.current_stream(device).wait_stream(stream)
        loss.backward()
        torch.cuda.synchronize(device)
        return [weight.grad.clone() for weight in net.parameters() if weight.grad is not None]

    for _ in range(5):
        assert all(map(torch.equal, gradients(activations), gradients(contextlib.nullcontext())))
