"""The benchmark of offloaded optimizers: complete, tidy, and able to see what it looks for. Its figures are not looked at."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ..support.patience import PATIENCE

pytestmark = pytest.mark.slow

OPTIMIZER_SWAP = Path(__file__).resolve().parents[2] / "benchmarks" / "optimizer_swap.py"


@dataclass(frozen=True)
class Run:
    printed: str
    document: dict[str, Any]
    left_behind: list[str]


def run(place: Path, parts: Sequence[str], *arguments: str, timeout: float = PATIENCE) -> Run:
    drive = place / "drive"
    drive.mkdir(parents=True)
    report = place / "report.json"
    done = subprocess.run(
        [sys.executable, OPTIMIZER_SWAP, "--quick", "--rounds", "2", "--dir", drive, "--json", report, *arguments]
        + [argument for part in parts for argument in ("--only", part)],
        capture_output=True,
        text=True,
        timeout=timeout,
        # Many threads for so small a model do nothing but wait for one another where there are fewer cores.
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return Run(done.stdout, json.loads(report.read_text()), [path.name for path in drive.iterdir()])


@pytest.fixture(scope="module")
def quick(io_dir: Path) -> Run:
    return run(io_dir / "optimizer_swap", ("limits", "plain", "deepspeed", "classes", "small"))


def test_everyone_takes_every_turn(quick: Run) -> None:
    comparisons = quick.document["comparisons"]
    assert set(comparisons["limits"]["samples"]) == {"in memory", "limits", "offloaded", "offloaded, half in memory"}
    assert set(comparisons["small"]["samples"]) == {"small put", "large put", "small get", "large get"}
    for group in comparisons.values():
        assert all(len(samples) == 2 for samples in group["samples"].values())
        assert all(sample["seconds"] > 0 for samples in group["samples"].values() for sample in samples)


def test_a_target_without_deepspeed_is_neither_met_nor_missed(quick: Run) -> None:
    targets = [target for target in quick.document["targets"] if "DeepSpeed" in target["what"]]
    assert len(targets) == 7
    assert all(target["met"] is None and "--deepspeed-python" in target["note"] for target in targets)
    assert "not measured" in quick.printed


@pytest.mark.timeout(1200)
def test_deepspeed_takes_its_turns_with_its_own_op_and_on_ours(request: pytest.FixtureRequest, drive: Path) -> None:
    python = request.config.getoption("--deepspeed-python")
    if not python:
        pytest.skip("needs an interpreter that has DeepSpeed 0.19.8: --deepspeed-python PATH")
    done = run(drive, ("deepspeed", "classes"), "--deepspeed-python", python, timeout=1100)
    contenders = done.document["contenders"]
    assert contenders["pipelined"]["swapper"].endswith("PipelinedOptimizerSwapper")
    assert contenders["in turn"]["swapper"].endswith("PartitionedOptimizerSwapper")
    assert contenders["deepspeed's classes, pipelined"]["op"].startswith("deepnvme.")
    assert contenders["deepnvme's classes, pipelined"]["swapper"].startswith("deepnvme.")
    assert not any(comparison["absent"] for comparison in done.document["comparisons"].values())
    losses = [target for target in done.document["targets"] if "losses that differ" in target["what"]]
    assert [target["met"] for target in losses] == [True, True]
    assert done.left_behind == []


def test_the_directory_is_empty_afterwards(quick: Run) -> None:
    assert quick.left_behind == []
