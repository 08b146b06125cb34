"""The report of a step of OffloadedTraining."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from deepnvme.offload import OffloadedTraining

WIDTH, BLOCKS = 64, 6


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(BLOCKS)))


def loss_of(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = module(x).square().mean()
    return loss


def step(training: OffloadedTraining) -> None:
    with training.micro_batch():
        loss_of(training.model, torch.ones(4, WIDTH)).backward()
    training.step()


@pytest.mark.parametrize("activations", ["memory", "nvme"])
def test_a_step_reads_and_writes_what_its_blocks_have(drive: Path, activations: str) -> None:
    module = model()
    nbytes = sum(param.nbytes for param in module.parameters())
    options = {"memory_budget": 0, "activations": activations, "lr": 1e-3}
    with OffloadedTraining(module, torch.optim.AdamW, path=drive, blocks=list(module), **options) as training:
        for number in (1, 2, 3):
            step(training)
            with torch.no_grad():
                module(torch.ones(4, WIDTH))  # does not count
            report = training.report()
            assert report.step == number
            assert report.bytes_written == 3 * nbytes  # parameters and two averages
            assert 0 <= report.waiting_to_write <= report.waiting <= report.seconds
            assert report.writing > 0
            assert f"step {number}: " in report.line()
            assert (report.activations is None) == (activations == "memory")
        # Parameters in the forward and the backward, and the averages; some of it is in memory still.
        assert 2 * nbytes < report.bytes_read <= 4 * nbytes
        assert report.reading > 0


def test_a_backward_does_not_read_a_frozen_embedding(drive: Path) -> None:
    module = nn.Sequential(nn.Embedding(20_000, WIDTH), *model())
    embedding = module[0].requires_grad_(False)
    embedding.register_forward_hook(lambda *call: call[-1].requires_grad_())  # as PEFT does for activation checkpointing
    blocks, read = list(module), 0
    with OffloadedTraining(module, torch.optim.SGD, path=drive, blocks=blocks, memory_budget=0, lr=1e-3) as training:
        for _ in range(4):
            with training.micro_batch():
                loss_of(module, torch.arange(4)).backward()
            training.step()
            read += training.report().bytes_read
    assert read < 6 * 20_000 * WIDTH * 4
