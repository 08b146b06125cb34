"""The benchmark of trainers' checkpoints: complete and tidy. What it times is not looked at; what kills leave is."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import trainer_checkpoints
from harness.trainer_kills import ELEMENTS, filled_after, is_whole
from trainer_checkpoints import CONTENDERS, Settings

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


def test_contenders_have_their_figures(drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    some = {"Lightning": ("default", "NVMeCheckpointIO"), "Trainer": ("async_checkpoints",)}  # each takes seconds to import
    monkeypatch.setattr(trainer_checkpoints, "CONTENDERS", some)
    settings = Settings(drive, rounds=1, gb=0.01, kills=1, only=("saves",))
    measurements = trainer_checkpoints.measure(settings, lambda step: None)
    assert [verdict.figure is not None for verdict in measurements.verdicts] == [True, True]
    for framework, names in some.items():
        comparison = measurements.comparisons[framework]
        assert comparison.absent == {}
        assert list(comparison.samples) == list(names)
        assert all(8e6 < sample["bytes"] < 2e7 for samples in comparison.samples.values() for sample in samples)
    assert trainer_checkpoints.report(measurements).count("Saves of") == 2
    assert list(drive.iterdir()) == []


def test_kills_leave_whole_checkpoints(drive: Path, tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    command = [sys.executable, "benchmarks/trainer_checkpoints.py", "--dir", str(drive), "--only", "kills", "--kills", "3"]
    printed = subprocess.run([*command, "--json", str(found)], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True, check=True)
    document = json.loads(found.read_text())
    for framework, names in CONTENDERS.items():
        of_ours = document["kills"][f"{framework}, {names[-1]}"]
        assert (of_ours["kills"], of_ours["not_whole"]) == (3, 0)
    assert [target["met"] for target in document["targets"]] == [True, True]
    assert "MISSED" not in printed.stdout
    assert list(drive.iterdir()) == []
