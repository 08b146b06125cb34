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
import torch
import training
from harness import training_buffers, training_dtype, training_identity, training_models
from harness.in_memory import InMemory
from harness.training_models import TrainingShape
from harness.training_usage import PeakMemory, own_memory

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


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_shape_counts_its_parameters_and_all_that_belongs_to_them(dtype: str) -> None:
    shape = TrainingShape(64, 2, 97, 1, 8, dtype=dtype)
    model = training_models.make(shape)
    params = list(model.parameters())
    assert [param.numel() for param in params] == shape.numels
    assert sum(shape.numels) == shape.elements
    assert {param.dtype for param in params} == {shape.torch_dtype}
    model(training_models.batch(shape, 0)).backward()
    masters = [param.detach().float().requires_grad_() for param in params]
    for master in masters:
        master.grad = torch.zeros_like(master)
    optimizer = torch.optim.AdamW(masters)
    optimizer.step()
    kept = [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    kept += [*params, *(param.grad for param in params)] + ([] if dtype == "float32" else masters)
    assert shape.nbytes == sum(tensor.nbytes for tensor in kept)


def test_what_changes_a_parameter_after_it_was_made_is_no_part_of_the_model() -> None:
    """DeepSpeed has taken its values to the drive by then."""
    embedding = training_models.Embedding(1000, 64)
    assert embedding.weight.std().item() == pytest.approx(0.02, rel=0.1)


def test_losses_show_what_was_learnt() -> None:
    shape = TrainingShape(64, 1, 97, 1, 8, dtype="float32")
    model = training_models.make(shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(8):
        loss = model(training_models.batch(shape, step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert max(losses[4:]) < 0.9 * min(losses[:2])


@pytest.mark.parametrize(("low", "chosen"), [(5.0, "float32"), (1.9, "bfloat16"), (0.5, "bfloat16")])
def test_bfloat16_is_for_machines_that_multiply_it(low: float, chosen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {torch.bfloat16: low, torch.float32: 1.0}
    monkeypatch.setattr(training_dtype, "_seconds", lambda dtype, *sizes: seconds[dtype])
    settings, _ = training.parse_arguments(["--quick"])
    shapes = (settings.compute_bound, settings.drive_bound, settings.with_deepspeed)
    assert {shape.dtype for shape in shapes} == {chosen}
    assert f"{low * 1e3:.3g} ms in bfloat16 and 1e+03 ms in float32" in settings.why_this_dtype


def test_both_dtypes_are_timed() -> None:
    dtype, why = training_dtype.choose(64, 128, 4)
    assert dtype in DTYPES
    assert "4 x 64 by 64 x 128, forward and backward" in why


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("millions", [94, 250, 1000])
def test_the_buffers_of_deepspeed_fill_the_budget(millions: int, dtype: str) -> None:
    settings, _ = training.parse_arguments(["--parameters", str(millions), "--dtype", dtype])
    buffers = training_buffers.divide(settings.with_deepspeed, settings.memory_budget)
    assert 0.9 * settings.memory_budget < buffers.nbytes <= settings.memory_budget


def test_buffers_have_room_for_the_largest_parameter_whatever_the_budget() -> None:
    shape = TrainingShape(64, 2, 97, 1, 8)
    buffers = training_buffers.divide(shape, 0)
    assert buffers.sub_group_size == 1  # each parameter is one
    assert buffers.nbytes == (16 * 4 + 2 + 5 * 2) * shape.largest_parameter


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


def test_a_width_that_has_no_heads_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        training.parse_arguments(["--width", "100"])
    assert "--width: 100 is not a multiple of 64" in capsys.readouterr().err
