"""The benchmark of training with everything on the drive: complete, tidy, and able to see what it looks for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import training
from harness import training_identity, training_models
from harness.in_memory import InMemory
from harness.training_models import TrainingShape
from harness.training_usage import PeakMemory, own_memory

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many threads for so small a model do nothing but wait for one another where there are fewer cores."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.mark.timeout(300)
def test_everyone_takes_every_turn(drive: Path, document_of: Callable[..., Any]) -> None:
    parts = ("drive", "deepspeed", "memory")
    document = document_of(training.main, drive, *(word for part in parts for word in ("--only", part)))
    (samples,) = (comparison["samples"] for comparison in document["comparisons"].values())
    assert {name: len(each) for name, each in samples.items()} == {"limits": 2, "offloaded": 2, "in memory": 2}
    assert all(min(each["bytes_read"], each["bytes_written"]) > 1 << 20 for each in samples["offloaded"])
    assert [each["loss"] for each in samples["offloaded"]] == [each["loss"] for each in samples["in memory"]]
    step, deepspeed, memory = document["targets"]
    assert step["met"] is not None
    assert deepspeed["met"] is None
    assert "not run: give --deepspeed-python" in deepspeed["note"]
    assert memory["figure"]["median"] > 0


@pytest.mark.filterwarnings("ignore:the drive sets the pace of save_on_disk:RuntimeWarning")  # which is no matter here
@pytest.mark.parametrize("case", training_identity.CASES, ids=str)
def test_bits_are_compared(case: training_identity.Case, drive: Path) -> None:
    assert training_identity.differences(case, drive, steps=2) == 0


def test_a_single_wrong_bit_is_counted(drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step, steps = InMemory.step, 0

    def disturbed(self: InMemory) -> None:
        nonlocal steps
        step(self)
        steps += 1
        if steps == 2:  # the last: one weight is off by its least bit
            self._parameters[0].data.view(torch.int32)[0, 0] += 1

    monkeypatch.setattr(InMemory, "step", disturbed)
    assert training_identity.differences(training_identity.CASES[0], drive, steps=2) == 1


def test_a_shape_counts_its_parameters() -> None:
    shape = TrainingShape(64, 2, 97, 1, 8)
    assert shape.elements == sum(param.numel() for param in training_models.make(shape).parameters())


def test_parameters_are_made_of_layers() -> None:
    shape = training.shape_of(250 * 10**6, 1024, 1, 32, 8192)
    assert abs(shape.elements - 250 * 10**6) <= shape.layer_elements / 2


def test_memory_is_seen_after_it_was_freed() -> None:
    before = own_memory()
    with PeakMemory() as memory:
        torch.ones(64 << 20, dtype=torch.uint8).sum()
        held = torch.ones(64 << 20, dtype=torch.uint8)
        memory._stop.wait(0.05)
        del held
    assert memory.highest - before > 48 << 20


def test_a_step_is_measured_against_the_slower_of_drive_and_memory() -> None:
    limits = {"seconds": 1, "read": 2e9, "write": 4e9}
    offloaded = {"seconds": 3.0, "bytes_read": 2e9, "bytes_written": 2e9}
    assert training.over_limit(offloaded, limits, {"seconds": 1.0}) == pytest.approx(2.0)
    assert training.over_limit(offloaded, limits, {"seconds": 3.0}) == pytest.approx(1.0)


def test_a_width_that_has_no_heads_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        training.parse_arguments(["--width", "100"])
    assert "--width: 100 is not a multiple of 64" in capsys.readouterr().err
