"""The benchmark of activations on the drive: complete, tidy, and able to see what it looks for. Its figures are not looked at."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from harness.activation_worker import OFFLOADED, OFFLOADED_WITH_ROOM

from ..support.patience import PATIENCE

pytestmark = pytest.mark.slow

ACTIVATIONS = Path(__file__).resolve().parents[2] / "benchmarks" / "activations.py"


@dataclass(frozen=True)
class Run:
    document: dict[str, Any]
    printed: str
    left_behind: list[Path]


def run(place: Path, *parts: str) -> Run:
    drive, report = place / "drive", place / "report.json"
    drive.mkdir(parents=True)
    done = subprocess.run(
        [sys.executable, ACTIVATIONS, "--quick", "--dir", drive, "--json", report]
        + [argument for part in parts for argument in ("--only", part)],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        # Many threads for so small a model do nothing but wait for one another where there are fewer cores.
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return Run(json.loads(report.read_text()), done.stdout, list(drive.iterdir()))


@pytest.fixture(scope="module")
def quick(io_dir: Path) -> Run:
    return run(io_dir / "activations", "compute", "drive", "memory")


def test_everyone_takes_every_turn(quick: Run) -> None:
    comparisons = quick.document["comparisons"].values()
    assert [len(comparison["samples"]) for comparison in comparisons] == [4, 7]
    for comparison in comparisons:
        assert not comparison["absent"]
        assert all(len(samples) == 2 for samples in comparison["samples"].values())
        assert all(sample["seconds"] > 0 for samples in comparison["samples"].values() for sample in samples)


def test_activations_go_to_the_drive_and_no_gradient_changes(quick: Run) -> None:
    for comparison in quick.document["comparisons"].values():
        for sample in comparison["samples"][OFFLOADED]:
            assert sample["bytes_written"] > sample["saved_bytes"] / 2
            assert sample["differs"] == 0
    chain = quick.document["comparisons"]["drive-bound: element-wise functions"]["samples"]
    assert all(sample["bytes_written"] == 0 for sample in chain[OFFLOADED_WITH_ROOM])


def test_every_target_has_a_line_and_the_directory_is_empty_afterwards(quick: Run) -> None:
    targets = quick.document["targets"]
    assert len(targets) == 10
    assert all(target["what"] in quick.printed for target in targets)
    assert quick.left_behind == []


def test_the_trainer_has_the_same_losses_with_and_without(drive: Path) -> None:
    pytest.importorskip("transformers", reason="needs transformers: pip install transformers accelerate")
    done = run(drive, "transformers")
    (target,) = done.document["targets"]
    assert target["met"]
    assert all(len(taken["losses"]) == 2 for taken in done.document["trainer"].values())
    assert done.document["trainer"]["enable()"]["bytes_written"] > 0
    assert done.left_behind == []
