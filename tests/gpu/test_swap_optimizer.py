"""OffloadedOptimizer of parameters on a device: the bits of an optimizer in memory that steps float32 copies on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ..support.engines import failing
from ..support.training import ADAM, copied, optimizer_in, same_bits

pytestmark = pytest.mark.gpu

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def model_on(device: torch.device, dtype: torch.dtype, second: torch.device | None = None) -> torch.nn.Sequential:
    """The same whenever it is asked for; its last layers on the second device, if there is one."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(60, 150), torch.nn.Tanh(), torch.nn.Linear(150, 90), torch.nn.Linear(90, 1)]
    model = torch.nn.Sequential(*layers).to(dtype)
    for index, layer in enumerate(model):
        layer.to(device if second is None or index < 2 else second)
    return model


def backward(model: torch.nn.Sequential, step: int) -> torch.Tensor:
    first = next(model.parameters())
    x = torch.randn(16, 60, generator=torch.Generator().manual_seed(step)).to(first.device, first.dtype)
    for layer in model:
        weight = next(layer.parameters(), None)
        x = layer(x if weight is None else x.to(weight.device))
    loss = x.float().square().mean()
    loss.backward()
    return loss.detach()


class Masters:
    """What the offloaded optimizer is compared with, fed with the gradients that the device makes."""

    def __init__(self, model: torch.nn.Module, **options: Any) -> None:
        self.params = list(model.parameters())
        self.masters = [torch.nn.Parameter(param.detach().to("cpu", torch.float32, copy=True)) for param in self.params]
        self.optimizer = torch.optim.AdamW(self.masters, **options)
        self._gradients: list[torch.Tensor] = []

    def look(self) -> None:
        """Keep the gradients that a backward has made, before anything takes them."""
        self._gradients = [param.grad.detach().to("cpu", torch.float32) for param in self.params if param.grad is not None]
        assert len(self._gradients) == len(self.params)

    def step(self) -> None:
        for master, gradient in zip(self.masters, self._gradients, strict=True):
            master.grad = gradient
        self.optimizer.step()

    def check(self, optimizer: Any) -> None:
        for param, master in zip(self.params, self.masters, strict=True):
            assert same_bits(param.detach().cpu(), master.detach().to(param.dtype))
        for state, master in zip(optimizer.state_dict()["state"].values(), self.masters, strict=True):
            assert same_bits(state["master_weight"], master.detach())
            for key in ("exp_avg", "exp_avg_sq"):
                assert same_bits(state[key], self.optimizer.state[master][key])


@pytest.mark.parametrize("memory_budget", [0, 120_000, 1 << 30])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_bits_of_masters_in_memory(dtype: torch.dtype, memory_budget: int, device: torch.device, drive: Path) -> None:
    model = model_on(device, dtype)
    reference = Masters(model, **ADAM)
    with optimizer_in(drive, model.parameters(), master_weights=True, memory_budget=memory_budget, **ADAM) as optimizer:
        for step in range(6):
            optimizer.zero_grad()
            backward(model, step)
            reference.look()
            reference.step()
            optimizer.step()
            reference.check(optimizer)


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_taken_in_backward(dtype: torch.dtype, devices: int, device: torch.device, drive: Path) -> None:
    """A twin makes the gradients that the reference is stepped with. Each of two devices has a thread of its own in backward."""
    if torch.cuda.device_count() < devices:
        pytest.skip("needs two CUDA devices")
    model, twin = (model_on(device, dtype, torch.device("cuda", devices - 1)) for _ in range(2))
    reference = Masters(twin, **ADAM)
    options = {"offload_gradients": True, "master_weights": True, "memory_budget": 60_000}
    with optimizer_in(drive, model.parameters(), **options, **ADAM) as optimizer:
        for step in range(6):
            twin.zero_grad()
            backward(twin, step)
            reference.look()
            backward(model, step)
            assert all(param.grad is None for param in model.parameters())
            optimizer.step()
            reference.step()
            with torch.no_grad():
                for param, master in zip(twin.parameters(), reference.masters, strict=True):
                    param.copy_(master)
            for param, other in zip(model.parameters(), twin.parameters(), strict=True):
                assert same_bits(param.detach(), other.detach())


def test_a_step_that_fails_is_finished_on_the_device(device: torch.device, drive: Path) -> None:
    model = model_on(device, torch.bfloat16)
    reference = Masters(model, **ADAM)
    with optimizer_in(drive, model.parameters(), master_weights=True, **ADAM) as optimizer:
        for step in range(4):
            backward(model, step)
            reference.look()
            with failing(("read", "write")[step % 2], step) as engine:
                try:
                    optimizer.step()
                except OSError:
                    assert engine.failed
                    optimizer.step()
            reference.step()
            reference.check(optimizer)
            optimizer.zero_grad()


def test_states_are_loaded_to_parameters_on_the_device(device: torch.device, drive: Path) -> None:
    model, other = model_on(device, torch.bfloat16), model_on(device, torch.bfloat16)
    with (
        optimizer_in(drive / "a", model.parameters(), master_weights=True, **ADAM) as optimizer,
        optimizer_in(drive / "b", other.parameters(), master_weights=True, memory_budget=1 << 30, **ADAM) as second,
    ):
        for step in range(3):
            optimizer.zero_grad()
            backward(model, step)
            optimizer.step()
        other.load_state_dict(model.state_dict())
        second.load_state_dict(copied(optimizer.state_dict()))
        for step in range(3, 6):
            for each, its_optimizer in ((model, optimizer), (other, second)):
                its_optimizer.zero_grad()
                backward(each, step)
                its_optimizer.step()
        for param, same in zip(model.parameters(), other.parameters(), strict=True):
            assert same_bits(param.detach(), same.detach())


def test_what_would_not_be_kept_exactly_is_refused(device: torch.device, drive: Path) -> None:
    param = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64, device=device))
    with pytest.raises(ValueError, match="cannot have float32 master weights"):
        optimizer_in(drive, [param], master_weights=True)
    with pytest.raises(ValueError, match="needs master_weights=True"):
        optimizer_in(drive, [param])
