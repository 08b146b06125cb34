"""The examples run as they say they do, and leave nothing behind. Tiny ones: what they measure is not looked at."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def run(name: str, *arguments: object) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", EXAMPLES / name, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=240,
        # Many threads for so small a model do nothing but wait for one another where there are fewer cores.
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_model_is_saved_and_restored(drive: Path) -> None:
    assert "every byte the same" in run("quickstart.py", "--dir", drive, "--layers", 1)
    assert list(drive.iterdir()) == []


def test_a_checkpoint_is_saved_and_loaded_both_ways(drive: Path) -> None:
    printed = run("checkpoint.py", "--dir", drive, "--layers", 1, "--rounds", 1)
    assert "each reads what the other wrote, every byte the same" in printed
    assert re.search(r"^save: [\d.]+ times as fast$", printed, re.MULTILINE)
    assert list(drive.iterdir()) == []


@pytest.mark.parametrize("processes", [1, 2])
def test_a_model_is_trained_with_its_states_on_the_drive_as_in_memory(drive: Path, processes: int) -> None:
    printed = run(
        "train_offloaded.py", "--dir", drive, "--width", 64, "--layers", 2, "--steps", 4, "--processes", processes
    )  # fmt: skip
    assert "4 losses, every one the same" in printed
    rows = re.findall(r"(in memory|on the drive) +│ +([\d.]+) +│ +([\d.]+) ", printed)
    assert [row[0] for row in rows] == ["in memory", "on the drive"]
    assert all(float(last) < float(first) for _, first, last in rows), "it has learned nothing"
    wrote = re.search(r"wrote\s+([\d.]+) MB", printed)
    assert wrote is not None
    assert float(wrote[1]) > 0, "no states went to the drive"
    assert list(drive.iterdir()) == []


def test_a_streamed_model_generates_what_it_does_in_memory(drive: Path) -> None:
    pytest.importorskip("transformers")
    printed = run("generate_streamed.py", "--dir", drive, "--size", 0.02, "--tokens", 4)
    assert "4 tokens, every one the same" in printed
    rows = re.findall(r"(in memory|streamed, 0\.005 GB of them kept) +│ +([\d.]+) +│ +(\d+) ", printed)
    assert [row[0] for row in rows] == ["in memory", "streamed, 0.005 GB of them kept"]
    assert list(drive.iterdir()) == []
