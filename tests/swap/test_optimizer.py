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
    "SGD with momentum": (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "fused": True}),
    "Adafactor": (torch.optim.Adafactor, {"lr": 1e-2}),
    "Lion": (Lion, {}),
}
BUDGETS = (0, 100_000, 1 << 40)
"""No states in memory, about half, all."""


def optimizer_in(drive: Path, params: Any, optimizer_class: Any, **options: Any) -> deepnvme.OffloadedOptimizer:
    options.setdefault("sub_group_size", 4096)
    return deepnvme.OffloadedOptimizer(params, optimizer_class, nvme_path=drive / "states", **options)


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "bfloat16 with masters"])
@pytest.mark.parametrize("name", OPTIMIZERS)
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
