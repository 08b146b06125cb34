"""The benchmark of training with DeepSpeed: complete, tidy, clear about what was not compared. Its figures are not looked at."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepspeed_training
import pytest
from deepspeed_training import ALONE, CONTENDERS, OP, SWAPPERS
from harness.comparison import Comparison

pytestmark = pytest.mark.slow

DEEPSPEED_TRAINING = Path(__file__).resolve().parents[2] / "benchmarks" / "deepspeed_training.py"


def test_without_deepspeed_no_target_is_met_or_missed(drive: Path, document_of: Callable[..., Any]) -> None:
    targets = document_of(deepspeed_training.main, drive)["targets"]
    assert len(targets) == 8
    assert all(target["met"] is None and "--deepspeed-python" in target["note"] for target in targets)


@pytest.mark.timeout(1200)
def test_each_trains_with_what_it_is_named_after(request: pytest.FixtureRequest, tmp_path: Path, drive: Path) -> None:
    python = request.config.getoption("--deepspeed-python")
    if not python:
        pytest.skip("needs an interpreter that has DeepSpeed 0.19.8: --deepspeed-python PATH")
    report = tmp_path / "report.json"
    done = subprocess.run(
        [sys.executable, DEEPSPEED_TRAINING, "--quick", "--dir", drive, "--json", report, "--deepspeed-python", python],
        capture_output=True,
        text=True,
        timeout=1100,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(report.read_text())
    assert list(document["comparisons"]) == ["2 M parameters", "2 M parameters, memory"]
    for comparison in document["comparisons"].values():
        assert comparison["absent"] == {}
        assert list(comparison["samples"]) == list(CONTENDERS)
    for sample in (sample for one in document["comparisons"].values() for each in one["samples"].values() for sample in each):
        assert 0 < sample["seconds"] < sample["whole_seconds"]
        assert min(sample["peak"], sample["peak_of_start"]) > 1 << 20
        assert len(set(sample["losses"])) == 2
    described = {name.partition(", ")[2]: each for name, each in document["contenders"].items()}
    assert [(described[name]["op"], described[name]["swapper"].split(".")[0]) for name in CONTENDERS] == [
        ("async_io", "deepspeed"),
        ("deepnvme.ops.aio.async_io_op", "deepspeed"),
        ("builtins", "deepnvme"),
    ]
    assert all(each["sub_groups"] == deepspeed_training.SUB_GROUPS for each in described.values())
    losses = [target["met"] for target in document["targets"] if "losses" in target["what"]]
    assert losses == [True, True]
    assert list(drive.iterdir()) == []


def sample(**counts: Any) -> dict[str, Any]:
    return {"seconds": 1.0, "whole_seconds": 2.0, "losses": ["0x1p0"], "peak": 100, "peak_of_start": 200, **counts}


def test_a_contender_that_fell_out_leaves_its_line_in_the_table() -> None:
    comparison = Comparison({ALONE: [sample()], OP: [], SWAPPERS: [sample(peak=3 << 20)]}, {OP: "no compiler"})
    lines = deepspeed_training.training_table("title", comparison).splitlines()
    assert next(line for line in lines if line.startswith(f"{OP}  ")).endswith("no compiler")
    assert next(line for line in lines if line.startswith(SWAPPERS)).split()[-2:] == ["3", "0"]


def test_memory_is_measured_where_the_allocator_gives_back_at_once(
    drive: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    variables = []

    def start_deepspeed(*_: Any, **named: Any) -> Any:
        variables.append(named["variables"])
        return contextlib.nullcontext(SimpleNamespace(call=lambda *_, **__: sample(peak=100 * len(variables))))

    monkeypatch.setattr(deepspeed_training, "start_deepspeed", start_deepspeed)
    given = ["--quick", "--only", "memory", "--dir", str(drive), "--deepspeed-python", sys.executable]
    assert deepspeed_training.main(given) == 0
    assert variables == [{"MALLOC_MMAP_THRESHOLD_": "1048576"}] * 3
    rows = re.findall(r"peak memory, (\w+) +([\d.]+) .* (\w+)$", capsys.readouterr().out, re.MULTILINE)
    assert rows == [
        ("training", "2.00", "MISSED"), ("starting", "1.00", "met"), ("training", "3.00", "MISSED"), ("starting", "1.00", "met")
    ]  # fmt: skip


def test_losses_are_compared_exactly() -> None:
    assert deepspeed_training.losses_differ(sample(), sample()) == 0
    assert deepspeed_training.losses_differ(sample(), sample(losses=["0x1.0000000000001p0"])) == 1


def test_layers_that_do_not_make_sub_groups_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        deepspeed_training.parse_arguments(["--layers", "12"])
    assert "--layers: 12 is not a multiple of 8" in capsys.readouterr().err
