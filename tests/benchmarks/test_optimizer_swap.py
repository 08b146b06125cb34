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

import optimizer_swap
import pytest
import torch
from harness import identity
from harness.in_memory import InMemory

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


def test_states_move_and_a_budget_keeps_some_of_them_still(quick: Run) -> None:
    samples = quick.document["comparisons"]["limits"]["samples"]
    for alone, kept in zip(samples["offloaded"], samples["offloaded, half in memory"], strict=True):
        assert alone["bytes_written"] > kept["bytes_written"] > 0


def test_without_masters_only_the_states_are_written(quick: Run) -> None:
    samples = quick.document["comparisons"]["plain"]["samples"]
    assert set(samples) == {"in memory", "limits", "offloaded"}
    written = [target for target in quick.document["targets"] if "bytes written for each parameter" in target["what"]]
    assert [target["met"] for target in written] == [True]


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


@pytest.mark.parametrize("case", identity.CASES, ids=lambda case: case.name)
def test_bits_are_compared(case: identity.Case, drive: Path) -> None:
    assert identity.differences(case, torch.bfloat16, drive, steps=2) == 0


def test_a_single_wrong_bit_is_counted(drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step, steps = InMemory.step, 0

    def disturbed(self: InMemory) -> None:
        nonlocal steps
        step(self)
        steps += 1
        if steps == 2:  # the last: one weight is off by its least bit
            weight = self._parameters[0].data.view(torch.int32)
            weight[0, 0] += 1

    monkeypatch.setattr(InMemory, "step", disturbed)
    assert identity.differences(identity.CASES[0], torch.float32, drive, steps=2) == 1


def test_one_sub_group_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        optimizer_swap.parse_arguments(["--layers", "4", "--sub-group", "3"])
    assert "--sub-group: 3 of 4" in capsys.readouterr().err
