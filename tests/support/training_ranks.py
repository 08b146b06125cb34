"""Programs of several processes that train a model together with OffloadedTraining."""

from __future__ import annotations

import textwrap
from pathlib import Path

from .interpreters import Interpreters
from .ranks import run_ranks

IMPORTS = """
import torch.distributed.checkpoint
import torch.distributed.tensor
import deepnvme.offload.training
import tests.support.engines
"""
"""What takes seconds, and is done once for all ranks."""

WORLD = """
import signal
from deepnvme.offload.training import OffloadedTraining
from deepnvme.offload.training.ranks import RankFailed
from tests.support.engines import FailingDrive

WIDTH = 64
ADAM = {"lr": 1e-2, "fused": True}


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.wide = torch.nn.Linear(WIDTH, 2 * WIDTH)
        self.narrow = torch.nn.Linear(2 * WIDTH, WIDTH)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return x + self.narrow(torch.nn.functional.gelu(self.wide(self.norm(x))))


class Model(torch.nn.Module):
    # The head is tied to the embedding, so they stay in memory on each rank.
    def __init__(self, seed=0, layers=4):
        torch.manual_seed(seed)
        super().__init__()
        self.embedding = torch.nn.Embedding(32, WIDTH)
        self.layers = torch.nn.ModuleList(Layer() for _ in range(layers))
        self.head = torch.nn.Linear(WIDTH, 32, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return torch.nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.roll(-1, 1).flatten())


def batches(step, count=ranks):
    ids = torch.randint(0, 32, (2 * count, 9), generator=torch.Generator().manual_seed(step))
    return ids.chunk(count)


def trained(model, name=None, **options):
    # With a name of its own, a training in this process alone.
    together = {} if name else {"process_group": dist.group.WORLD}
    options = {"memory_budget": 0, **together, **ADAM, **options}
    return OffloadedTraining(model, torch.optim.AdamW, path=drive / (name or "together"), **options)


def evaluate(model):
    with torch.no_grad():
        model(batches(9)[0])


def whole(value):
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def assert_same_states(found, expected):
    assert found.keys() == expected.keys(), (found.keys(), expected.keys())
    for key, value in expected.items():
        if isinstance(value, dict):
            assert_same_states(found[key], value)
        elif isinstance(value, torch.Tensor):
            assert torch.equal(whole(found[key]), value), key
        else:
            assert found[key] == value, key


def train_alone(training, steps):
    # What all ranks do together, as micro-batches: the loss of each, as the rank with these has it.
    for step in steps:
        losses = []
        for batch in batches(step):
            with training.micro_batch():
                loss = training.model(batch)
                (loss / ranks).backward()
                losses.append(loss.item())
        training.step()
        yield losses[rank]


def train(training, steps):
    for step in steps:
        yield training.step(batches(step)[rank]).item()
"""


def run(count: int, *programs: str, drive: Path, interpreters: Interpreters) -> None:
    """Run programs, one after the other, as each of ``count`` ranks, each with what ``WORLD`` defines.

    They share a process group: to make one takes as long as most programs.
    """
    separate = [WORLD + textwrap.dedent(program) + "\ndist.barrier()\n" for program in programs]
    run_ranks(count, "".join(separate), drive, interpreters, before_fork=IMPORTS)
