"""The benchmark of checkpoints: complete, tidy, and able to see what it looks for. Its figures are not looked at."""

from __future__ import annotations

import json
from pathlib import Path

import checkpoint
import pytest
import torch
from harness import checkpoints
from harness.free_memory import FreeMemory
from harness.workloads import ContenderFailed

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoint")


def test_every_target_has_a_line_and_nothing_is_left_behind(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drive = directory / "drive"
    drive.mkdir()
    report = directory / "report.json"
    checkpoint.main(["--quick", "--rounds", "1", "--dir", str(drive), "--json", str(report)])
    document = json.loads(report.read_text())
    printed = capsys.readouterr().out
    assert all(target["what"] in printed for target in document["targets"])
    ours = [target for target in document["targets"] if "Run:ai" not in target["what"] and "safetensors" not in target["what"]]
    assert len(document["targets"]) == 17
    assert all(target["figure"] is not None for target in ours)
    assert list(drive.iterdir()) == []


def test_a_load_that_comes_back_differently_is_a_failure(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"weight": torch.arange(10.0)}
    liar = checkpoints.Library(lambda state, path: torch.save(state, path), lambda path, state: {"weight": torch.zeros(10)})
    monkeypatch.setattr(checkpoint, "library", lambda name: liar)
    with pytest.raises(ContenderFailed, match="came back differently"):
        checkpoint.loading("liar", state, directory, FreeMemory(1 << 20))()


def test_a_library_that_is_not_installed_takes_no_part(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> checkpoints.Library:
        raise ImportError("no module")

    monkeypatch.setitem(checkpoints._MAKERS, "absent", missing)  # type: ignore[index]
    with pytest.raises(ContenderFailed, match="not installed"):
        checkpoints.library("absent")
