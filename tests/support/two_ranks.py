"""Programs of two processes, the ranks of a process group, with a small model that FSDP2 has sharded."""

from __future__ import annotations

import textwrap
from pathlib import Path

from .interpreters import Interpreters
from .ranks import run_ranks

IMPORTS = """
import deepnvme
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
"""
PRELUDE = """
import copy
from torch.distributed.tensor import DTensor

warnings.simplefilter("default")  # torch's own
mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
ADAM = {"lr": 1e-2, "fused": True}


def sharded(dtype=torch.float32):
    torch.manual_seed(0)
    # rows that two ranks cannot share evenly, a parameter of one element and one that only the first rank has
    model = torch.nn.Sequential(
        torch.nn.Linear(63, 301), torch.nn.Tanh(), torch.nn.Linear(301, 63), torch.nn.LayerNorm(63), torch.nn.Linear(63, 1)
    ).to(dtype)
    for layer in model:
        if not isinstance(layer, torch.nn.Tanh):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def train(model, optimizer, steps, clip=None):
    losses = []
    for step in steps:
        optimizer.zero_grad()
        inputs = torch.randn(8, 63, generator=torch.Generator().manual_seed(2 * step + rank)).to(next(model.parameters()).dtype)
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        loss.backward()
        if clip is not None:
            clip(model, optimizer)
        optimizer.step()
        losses.append(loss.item())
    return losses


def offloaded(model, name="states", **options):
    return deepnvme.OffloadedOptimizer(
        model.parameters(), torch.optim.AdamW, path=os.path.join(drive, name), sub_group_size=4096, **ADAM, **options
    )


def assert_same(model, other):
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one.to_local(), two.to_local())


def assert_same_states(found, expected):
    assert found.keys() == expected.keys(), (found.keys(), expected.keys())
    for key, value in expected.items():
        if isinstance(value, dict):
            assert_same_states(found[key], value)
        elif isinstance(value, DTensor):
            assert isinstance(found[key], DTensor), key
            assert found[key].placements == value.placements and found[key].shape == value.shape, key
            assert torch.equal(found[key].to_local(), value.to_local()), key
        elif isinstance(value, torch.Tensor):
            assert torch.equal(found[key], value), key
        elif key != "param_groups":
            assert found[key] == value, key
"""


def run_two(program: str, drive: Path, interpreters: Interpreters) -> None:
    """Run ``program`` as both ranks, with what ``PRELUDE`` defines."""
    run_ranks(2, PRELUDE + textwrap.dedent(program), drive, interpreters, before_fork=IMPORTS)
