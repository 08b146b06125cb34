"""The benchmark of training with DeepSpeed: complete, tidy, clear about what was not compared. Its figures are not looked at."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed_training
import pytest
from deepspeed_training import CONTENDERS

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
