"""Every report gives its numbers by name."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import deepnvme
from deepnvme.offload import ActivationReport, TrainingReport
from deepnvme.telemetry.report_figures import ReportFigures

from ..support.training import give_gradients, parameters


@dataclass(frozen=True)
class Inner(ReportFigures):
    count: int


@dataclass(frozen=True)
class Outer(ReportFigures):
    seconds: float
    limit: float | None
    name: str
    well: bool
    bins: dict[int, int]
    inner: Inner | None
    _private: int = 7

    @property
    def twice(self) -> float:
        return 2 * self.seconds


def test_fields_properties_and_reports_within_are_numbers_by_name() -> None:
    report = Outer(1.5, 2.0, "a", True, {1: 2}, Inner(3))
    assert report.as_dict() == {"seconds": 1.5, "limit": 2.0, "inner_count": 3, "twice": 3.0}
    assert report.as_dict("x/") == {"x/seconds": 1.5, "x/limit": 2.0, "x/inner_count": 3, "x/twice": 3.0}


def test_what_is_not_known_is_left_out() -> None:
    assert Outer(1.5, None, "a", True, {}, None).as_dict() == {"seconds": 1.5, "twice": 3.0}


def test_a_training_report_has_the_numbers_of_its_activations() -> None:
    activations = ActivationReport(10, 6, 4, 8, 2.0, 0.25, 0.5)
    report = TrainingReport(
        step=3, seconds=1.0, waiting=0.5, waiting_to_write=0.1, reading=0.2, writing=0.3, bytes_read=100, bytes_written=24,
        activations=activations, period=2.0, peak_bytes=512,
    )  # fmt: skip
    figures = report.as_dict()
    assert figures["activations_waiting"] == 0.75
    assert figures["bytes_written"] == 24
    assert figures["terabytes_per_day"] == pytest.approx((24 + 6) / 2 * 86400 / 1e12)


def test_the_pace_of_writing_is_that_from_step_to_step(drive: Path) -> None:
    params = parameters(shapes=[(1 << 16,)])
    with deepnvme.OffloadedOptimizer(params, torch.optim.AdamW, path=drive / "states") as optimizer:
        for step in range(3):
            give_gradients(params, step)
            optimizer.step()
            report = optimizer.report()
            assert (report.period == report.seconds) == (step == 0)
            assert report.period >= report.seconds
            assert report.terabytes_per_day == pytest.approx(report.bytes_written / report.period * 86400 / 1e12)
            assert report.as_dict()["terabytes_per_day"] == report.terabytes_per_day
