"""OffloadedOptimizer: what the optimizer in memory does, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import deepnvme

from .training import (
    SHAPES,
    InMemory,
    Lion,
    assert_same,
    assert_same_state,
    give_gradients,
    parameters,
)

STEPS = 50
ADAM = {"lr": 1e-2, "fused": True}

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "Adadelta": (torch.optim.Adadelta, {}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 1e-2}),
    "fused Adagrad": (torch.optim.Adagrad, {"lr": 1e-2, "fused": True}),
    "Adam": (torch.optim.Adam, {"lr": 1e-2}),
    "fused Adam": (torch.optim.Adam, ADAM),
    "AdamW with amsgrad": (torch.optim.AdamW, {"lr": 1e-2, "amsgrad": True}),
    "fused AdamW": (torch.optim.AdamW, ADAM),
    "AdamW with foreach": (torch.optim.AdamW, {"foreach": True}),
    "Adamax": (torch.optim.Adamax, {}),
    "ASGD": (torch.optim.ASGD, {"lr": 1e-2, "t0": 20}),
    "NAdam": (torch.optim.NAdam, {}),
    "RAdam": (torch.optim.RAdam, {}),
    "RMSprop": (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
    "Rprop": (torch.optim.Rprop, {}),
    "SGD": (torch.optim.SGD, {"lr": 1e-2}),
    "SGD with momentum": (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "nesterov": True}),
    "Adafactor": (torch.optim.Adafactor, {"lr": 1e-2}),
    "Lion": (Lion, {}),
}
FUSED_SGD = {"lr": 1e-2, "momentum": 0.9, "fused": True}
CASES = [(name, precision) for name in OPTIMIZERS for precision in ("float32", "bfloat16", "bfloat16 with masters")]
# torch's fused SGD itself rounds momenta in bfloat16 differently from run to run
OPTIMIZERS["fused SGD"] = (torch.optim.SGD, FUSED_SGD)
CASES += [("fused SGD", "float32"), ("fused SGD", "bfloat16 with masters")]
BUDGETS = (0, 100_000, 1 << 40)
"""No states in memory, about half, all."""


def optimizer_in(drive: Path, params: Any, optimizer_class: Any, **options: Any) -> deepnvme.OffloadedOptimizer:
    options.setdefault("sub_group_size", 4096)
    return deepnvme.OffloadedOptimizer(params, optimizer_class, nvme_path=drive / "states", **options)


@pytest.mark.parametrize(("name", "precision"), CASES)
def test_fifty_steps_give_the_bits_of_the_optimizer_in_memory(name: str, precision: str, drive: Path) -> None:
    optimizer_class, options = OPTIMIZERS[name]
    masters = precision.endswith("masters")
    dtype = torch.float32 if precision == "float32" else torch.bfloat16
    shapes = [shape for shape in SHAPES if shape != (0,) or optimizer_class is not torch.optim.Adafactor]  # it divides by that
    plain, params = parameters(dtype, shapes), parameters(dtype, shapes)
    reference = InMemory(plain, optimizer_class, **options) if masters else optimizer_class(plain, **options)
    budget = BUDGETS[(list(OPTIMIZERS).index(name) + len(precision)) % 3]
    with optimizer_in(drive, params, optimizer_class, master_weights=masters, dram_budget=budget, **options) as optimizer:
        for step in range(STEPS):
            give_gradients(plain, step)
            give_gradients(params, step)
            reference.step()
            optimizer.step()
            if step in (0, 1, 2, STEPS - 1):
                assert_same(params, plain)
        expected = reference.optimizer if masters else reference
        assert_same_state(optimizer.state_dict(), expected.state_dict())


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", ["Adam", "fused AdamW", "Adadelta", "Adagrad", "NAdam", "Rprop", "fused SGD"])
def test_a_parameter_in_many_sub_groups_is_rounded_as_one(name: str, threads: int, drive: Path) -> None:
    torch.set_num_threads(threads)
    optimizer_class, options = OPTIMIZERS[name]
    shapes = [(100_003,), (317, 229)]  # more than torch gives to one thread
    plain, params = parameters(shapes=shapes), parameters(shapes=shapes)
    reference = optimizer_class(plain, **options)
    with optimizer_in(drive, params, optimizer_class, sub_group_size=3 * 4096 + 5, **options) as optimizer:
        for step in range(4):
            give_gradients(plain, step)
            give_gradients(params, step)
            reference.step()
            optimizer.step()
        assert_same(params, plain)
        assert_same_state(optimizer.state_dict(), reference.state_dict())


@pytest.mark.parametrize("masters", [False, True])
@pytest.mark.parametrize("name", ["Adam", "fused AdamW", "fused SGD"])
def test_parameters_in_another_order_of_memory(name: str, masters: bool, drive: Path) -> None:
    """Fused kernels take elements in the order of memory, whatever that is: all tensors of a parameter must have the same."""
    optimizer_class, options = OPTIMIZERS[name]
    dtype = torch.bfloat16 if masters else torch.float32

    def channels_last() -> list[torch.nn.Parameter]:
        conv, linear = parameters(dtype, [(8, 5, 3, 3), (300, 40)])
        params = [conv.detach().to(memory_format=torch.channels_last), linear.detach().t()]
        return [torch.nn.Parameter(param) for param in params]

    plain, params = channels_last(), channels_last()
    reference = InMemory(plain, optimizer_class, **options) if masters else optimizer_class(plain, **options)
    with optimizer_in(drive, params, optimizer_class, master_weights=masters, **options) as optimizer:
        for step in range(4):
            for each in (plain, params):
                give_gradients(each, step)
                for param in each:
                    assert param.grad is not None
                    param.grad = torch.empty_like(param).copy_(param.grad)
            reference.step()
            optimizer.step()
        assert_same(params, plain)
        expected = reference.optimizer if masters else reference
        assert_same_state(optimizer.state_dict(), expected.state_dict())


def test_gradients_in_another_order_of_memory_than_their_cut_parameter(drive: Path) -> None:
    plain, params = parameters(shapes=[(300, 41)]), parameters(shapes=[(300, 41)])
    reference = torch.optim.Adam(plain, lr=1e-2)
    with optimizer_in(drive, params, torch.optim.Adam, lr=1e-2) as optimizer:
        for each in (plain, params):
            each[0].grad = torch.randn(41, 300, generator=torch.Generator().manual_seed(1)).t()
        reference.step()
        optimizer.step()
        assert_same(params, plain)
