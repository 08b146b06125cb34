"""The benchmark of trainers' checkpoints: complete and tidy. What it times is not looked at; what kills leave is."""

from __future__ import annotations

import argparse
import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import trainer_checkpoints
from trainer_checkpoints import CONTENDERS, ELEMENTS, filled_after, is_whole

from ..support.interpreters import REPOSITORY

pytestmark = pytest.mark.slow


def test_a_checkpoint_of_another_step_or_of_mixed_steps_is_not_whole(tmp_path: Path) -> None:
    weight, momentum = (torch.full((ELEMENTS,), value) for value in filled_after(3))
    states = [{"state": {0: {"momentum_buffer": momentum}}}]
    state = {"global_step": 3, "state_dict": {"model.weight": weight}, "optimizer_states": states}
    path = tmp_path / "step=3.ckpt"
    torch.save(state, path)
    assert is_whole(path)
    assert not is_whole(path.rename(tmp_path / "step=4.ckpt"))
    momentum[-1] = 0
    torch.save(state, path)
    assert not is_whole(path)
    path.write_bytes(path.read_bytes()[:1000])
    assert not is_whole(path)


@pytest.mark.filterwarnings("ignore")  # of the packages that are measured
@pytest.mark.parametrize("contender", ["Lightning NVMeCheckpointIO", "Trainer async_checkpoints"])
def test_a_contender_has_its_figures(drive: Path, contender: str, capsys: pytest.CaptureFixture[str]) -> None:
    trainer_checkpoints.run(argparse.Namespace(dir=drive, gb=0.01, worker=contender))
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert figures.keys() == {"first", "held", "gb"}
    assert 0.008 < figures["gb"] < 0.02


def test_kills_leave_whole_checkpoints(drive: Path) -> None:
    command = [sys.executable, "benchmarks/trainer_checkpoints.py", "--dir", str(drive), "--rounds", "0", "--kills", "3"]
    printed = subprocess.run(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True, check=True).stdout
    for framework, names in CONTENDERS.items():
        (line,) = (line for line in printed.splitlines() if line.startswith(f"{framework}, {names[-1]}: "))
        found = ast.literal_eval(line.partition(": ")[2])
        assert found["kills"] == 3
        assert found["not whole"] == 0
    assert list(drive.iterdir()) == []
