"""gpu_models.py with host memory in the place of the GPU's: every part runs, and what was not seen is named."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from ..support.patience import PATIENCE

pytestmark = pytest.mark.slow

pytest.importorskip("transformers", reason="needs transformers, to make a Llama: pip install transformers")

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
HOST = torch.device("cpu")


@pytest.fixture
def gpu_models(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("gpu_models")


@pytest.fixture
def settings(gpu_models: ModuleType, drive: Path) -> Callable[..., Any]:
    """Of the smallest run."""
    return lambda seconds: gpu_models.Settings(drive, rounds=1, seconds=seconds, width=256, layers=2, vocabulary=1000)


def test_every_part_has_a_table_and_nothing_is_left_behind(
    gpu_models: ModuleType, settings: Callable[..., Any], drive: Path
) -> None:
    given = settings(10_000)
    measurements = gpu_models.measure(given, HOST, lambda step: None)
    assert measurements.notes == []
    assert len(measurements.comparisons) == 6
    assert all(each.samples[gpu_models.OURS] for each in measurements.comparisons.values())
    document = json.loads(json.dumps(gpu_models.as_json(given, measurements, HOST, "now")))
    printed = gpu_models.report(measurements)
    assert all(title in printed for title in document["rows"])
    assert all(target["what"] in printed for target in document["targets"])
    assert list(drive.iterdir()) == []


def test_parts_for_which_there_is_no_time_are_named(gpu_models: ModuleType, settings: Callable[..., Any]) -> None:
    measurements = gpu_models.measure(settings(0), HOST, lambda step: None)
    assert [note.partition(": ")[0] for note in measurements.notes] == list(gpu_models.PARTS)
    assert "streaming: not seen: 0 seconds were over" in gpu_models.report(measurements)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA device")
def test_without_a_gpu_it_says_so_in_one_line() -> None:
    command = [sys.executable, str(BENCHMARKS / "gpu_models.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("gpu_models: needs a CUDA device, and PyTorch")
    assert len(done.stderr.splitlines()) == 1
