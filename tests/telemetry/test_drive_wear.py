"""How much will be written is known before it is, and is what is written then."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import deepnvme
from deepnvme.offload import OffloadedTraining, WriteEstimate

from ..support.training import backward, parameters

PAGES = 0.05
"""Share of the bytes of tensors as small as these that the rest of a page may be."""


def test_days_and_years_are_those_of_the_bytes() -> None:
    estimate = WriteEstimate(bytes_per_step=10**9, most_bytes_per_step=10**9, bytes_once=0)
    assert estimate.terabytes_per_day(1) == pytest.approx(86.4)
    assert estimate.terabytes_per_day(4) == pytest.approx(21.6)
    assert estimate.years(1, 86.4 * 365) == pytest.approx(1)
    assert WriteEstimate(0, 0, 5).years(1, 600) == float("inf")


def test_what_is_written_once_is_part_of_a_drives_life() -> None:
    assert WriteEstimate(10**9, 10**9, 10**12).years(1, 87.4) == pytest.approx(1 / 365)


@pytest.mark.parametrize("value", [0, -1, float("nan")])
def test_a_step_takes_time(value: float) -> None:
    with pytest.raises(ValueError, match="seconds_per_step must be positive"):
        WriteEstimate(1, 1, 0).terabytes_per_day(value)
    with pytest.raises(ValueError, match="rated_terabytes must be positive"):
        WriteEstimate(1, 1, 0).years(1, value)


def test_as_text_it_says_what_is_written_and_at_which_pace() -> None:
    said = str(WriteEstimate(12_000_000_000, 14_000_000_000, 3_000_000))
    assert said == "writes 12.00 GB per step or save, at most 14.00 GB, and 3.0 MB once; 1036.80 TB a day at one per second"


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"master_weights": True},
        {"offload_gradients": True},
        {"memory_budget": 7 << 19},
        {"memory_budget": 7 << 19, "offload_gradients": True},
        {"memory_budget": 1 << 30},
    ],
    ids=str,
)
def test_an_optimizer_writes_what_it_has_estimated(drive: Path, options: dict[str, Any]) -> None:
    params = parameters(torch.bfloat16 if "master_weights" in options else torch.float32, shapes=[(1 << 18,), (512, 1024)])
    with deepnvme.OffloadedOptimizer(
        params, torch.optim.AdamW, path=drive / "states", sub_group_size=1 << 17, **options
    ) as optimizer:
        estimate = optimizer.estimate_writes()
        written = []
        for step in range(3):
            backward(params, step)
            optimizer.step()
            optimizer.zero_grad()
            written.append(optimizer.report().bytes_written)
        known = optimizer.estimate_writes()
    slack = PAGES * 12 * sum(param.numel() for param in params)
    for found in written[1:]:
        assert estimate.bytes_per_step - slack <= found <= estimate.most_bytes_per_step + slack
        assert known.bytes_per_step <= found <= known.most_bytes_per_step
    assert estimate.bytes_once == known.bytes_once == 0


@pytest.mark.parametrize(
    "options",
    [{}, {"max_norm": 1.0}, {"micro_batches": 2}, {"parameters": "memory"}],
    ids=str,
)
def test_a_training_writes_what_it_has_estimated(drive: Path, options: dict[str, Any]) -> None:
    module = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
    with OffloadedTraining(
        module, torch.optim.AdamW, path=drive, blocks=list(module), memory_budget=0, lr=1e-3, **options
    ) as training:
        estimate = training.estimate_writes()
        for _ in range(3):
            for _ in range(options.get("micro_batches", 1)):
                with training.micro_batch():
                    module(torch.ones(4, 256)).square().mean().backward()
            training.step()
        report = training.report()
        known = training.estimate_writes()
    nbytes = sum(param.nbytes for param in module.parameters())
    assert known.bytes_per_step <= report.bytes_written <= known.most_bytes_per_step
    assert estimate.bytes_per_step == pytest.approx(3 * nbytes, rel=PAGES)
    assert estimate.bytes_once == pytest.approx(nbytes, rel=PAGES)
    waits = "micro_batches" in options or options == {"max_norm": 1.0}
    assert estimate.most_bytes_per_step - estimate.bytes_per_step == pytest.approx(nbytes if waits else 0, rel=PAGES)


def test_the_estimate_is_logged_before_the_first_step(drive: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="deepnvme")
    with deepnvme.OffloadedOptimizer(parameters(), torch.optim.AdamW, path=drive / "states") as optimizer:
        assert caplog.messages == [f"AdamW with its states in {drive}/states {optimizer.estimate_writes()}"]
    caplog.clear()
    with OffloadedTraining(nn.Sequential(nn.Linear(8, 8)), torch.optim.AdamW, path=drive) as training:
        assert caplog.messages == [f"the training in {drive} {training.estimate_writes()}"]
