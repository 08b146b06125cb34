"""The benchmark of training with everything on the drive: complete, tidy, and able to see what it looks for."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import training
from harness import training_buffers
from harness.training_models import TrainingShape

from ..support.patience import PATIENCE

pytestmark = pytest.mark.slow

TRAINING = Path(__file__).resolve().parents[2] / "benchmarks" / "training.py"
DTYPES = ("float32", "bfloat16")


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many threads for so small a model do nothing but wait for one another where there are fewer cores."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.mark.parametrize("dtype", DTYPES)
def test_everyone_takes_every_turn(dtype: str, drive: Path, document_of: Callable[..., Any]) -> None:
    parts = ("drive", "deepspeed", "memory")
    document = document_of(training.main, drive, "--dtype", dtype, *(word for part in parts for word in ("--only", part)))
    (samples,) = (comparison["samples"] for comparison in document["comparisons"].values())
    assert {name: len(each) for name, each in samples.items()} == {"limits": 2, "offloaded": 2, "in memory": 2}
    assert all(min(each["bytes_read"], each["bytes_written"]) > 1 << 20 for each in samples["offloaded"])
    assert [each["loss"] for each in samples["offloaded"]] == [each["loss"] for each in samples["in memory"]]
    step, *deepspeed, memory = document["targets"]
    assert step["met"] is not None
    assert [target["met"] for target in deepspeed] == [None, None]
    assert all("not run: give --deepspeed-python" in target["note"] for target in deepspeed)
    assert memory["figure"]["median"] > 0
    assert all(dtype in target["what"] for target in document["targets"])


@pytest.mark.parametrize(("dtype", "parameters", "width"), [("float32", 18, 512), ("bfloat16", 27, 1024)])  # of no small matrices
def test_deepspeed_trains_the_same_model_from_the_drive(
    dtype: str, parameters: int, width: int, request: pytest.FixtureRequest, drive: Path
) -> None:
    python = request.config.getoption("--deepspeed-python")
    if not python:
        pytest.skip("needs an interpreter that has DeepSpeed 0.19.8: --deepspeed-python PATH")
    benchmarked, report = drive / "benchmarked", drive / "report.json"
    benchmarked.mkdir()
    small = ["--quick", "--only", "deepspeed", "--parameters", f"{parameters}", "--width", f"{width}", "--dtype", dtype]
    small += ["--budget-share", "3"]  # no less holds the largest block
    done = subprocess.run(
        [sys.executable, TRAINING, *small, "--dir", benchmarked, "--json", report, "--deepspeed-python", python],
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(report.read_text())
    faster, alike = document["targets"]
    assert alike["met"]
    assert faster["met"] is not None
    described = next(each for name, each in document["contenders"].items() if name.endswith(", DeepSpeed"))
    assert described["parameters"] == f"torch.{dtype}"
    assert described["sub_groups"] > 4
    shape = TrainingShape(**document["settings"]["with_deepspeed"])
    budget = document["settings"]["memory_budget"]
    assert described["buffer_bytes"] == pytest.approx(training_buffers.divide(shape, budget).nbytes, rel=0.01)
    (comparison,) = document["comparisons"].values()
    for sample in comparison["samples"]["DeepSpeed"]:
        # Parameters twice, and master weights and averages: all that is as large as what DeepSpeed has on the drive.
        assert sample["bytes_read"] > 12 * shape.elements
    assert list(benchmarked.iterdir()) == []


def losses_of(ours: float, theirs: float, monkeypatch: pytest.MonkeyPatch, drive: Path) -> tuple[training.Measurements, Any]:
    """What becomes of a comparison in which two processes have these losses."""

    def process(loss: float, **described: Any) -> Any:
        step = {"seconds": 1.0 if described else 0.5, "loss": loss.hex()}
        return contextlib.nullcontext(SimpleNamespace(call=lambda *_: dict(step), described=described))

    monkeypatch.setattr(training, "worker", lambda *_, **__: process(ours))
    monkeypatch.setattr(training, "deepspeed", lambda *_: process(theirs, buffer_bytes=3 << 20, growth=7 << 20))
    settings, _ = training.parse_arguments(["--quick", "--dtype", "float32"])
    settings = dataclasses.replace(settings, deepspeed_python=sys.executable)
    measurements = training.Measurements()
    training.compare_with_deepspeed(settings, drive, measurements, lambda _: None)
    (comparison,) = measurements.comparisons.values()
    return measurements, comparison


def test_deepspeed_is_judged_where_it_trains_the_same_model(monkeypatch: pytest.MonkeyPatch, drive: Path) -> None:
    measurements, comparison = losses_of(9.0, 9.0001, monkeypatch, drive)
    faster, alike = measurements.verdicts
    assert alike.met
    assert faster.figure is not None
    assert faster.figure.median == 2.0
    assert "DeepSpeed's 3 MiB and beside them 4 MiB" in faster.what
    assert comparison.absent == {}


@pytest.mark.parametrize("loss", [9.1, float("nan")])
def test_another_model_is_no_comparison(loss: float, monkeypatch: pytest.MonkeyPatch, drive: Path) -> None:
    measurements, comparison = losses_of(loss, 9.0, monkeypatch, drive)
    faster, alike = measurements.verdicts
    assert alike.met is False
    assert faster.figure is None
    assert "another model" in faster.note
    assert "another model" in comparison.absent["DeepSpeed"]  # and so the benchmark ends with 1
