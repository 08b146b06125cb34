"""make gpu-check's table: everything that was done is in it, and what failed fails the whole. No GPU is needed for that."""

from __future__ import annotations

import importlib
import os
import shutil
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

REPOSITORY = Path(__file__).resolve().parents[2]

FIGURE = {"median": 2.0, "low": 1.5, "high": 2.5}
DOCUMENT: dict[str, Any] = {
    "settings": {"size": 1 << 30, "rounds": 7},
    "workloads": [
        {
            "name": "read",
            "series": [
                {"contender": "host", "memory": "pinned", "failure": "", "gb_per_second": FIGURE},
                {"contender": "aio", "memory": "device", "failure": "", "gb_per_second": FIGURE},
            ],
        }
    ],
    "first_request_seconds": {"host": 0.5, "aio": 0.75},
    "gds": {"bytes_gds": 0, "bytes_direct": 4096},
    "targets": [
        {"what": "aio / host", "figure": FIGURE, "sense": "at least", "bound": 0.9, "met": True, "note": ""},
        {"what": "other / host", "figure": FIGURE, "sense": "at least", "bound": 3, "met": False, "note": ""},
        {"what": "gds / aio", "figure": None, "sense": "at least", "bound": 1.0, "met": None, "note": "no driver"},
    ],
}

MODELS: dict[str, Any] = {
    "state_bytes": 7_400_000_000,
    "rows": {
        "load": [["deepnvme", "1.5 (1.4 - 1.6)", "2.00", "0.10", "9", ""], ["other", "-", "-", "-", "-", "not installed"]],
        "step": [["deepnvme", "2.5 (2.4 - 2.6)", "-", "0.50", "-", ""]],
    },
    "notes": ["cache: not seen: 240 seconds were over"],
}


@pytest.fixture
def gpu_check(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(REPOSITORY / "benchmarks"))
    return importlib.import_module("gpu_check")


@pytest.fixture
def on_a_gpu(gpu_check: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """Its status and what it prints, where the steps end with these rows."""

    def run(tests: Any, benchmark: list[Any]) -> tuple[int, str]:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "A GPU")
        monkeypatch.setattr(gpu_check, "build", lambda builder: gpu_check.Row(f"{builder.name} op", "1.0 s", "built", "met"))
        monkeypatch.setattr(gpu_check, "run_tests", lambda *_: tests)
        monkeypatch.setattr(gpu_check, "run_benchmark", lambda *_: benchmark)
        return gpu_check.main([]), capsys.readouterr().out

    return run


def test_everything_is_in_one_table(gpu_check: ModuleType, on_a_gpu: Callable[..., Any]) -> None:
    tests = gpu_check.Row("tests/gpu", "300 passed, 0 failed, 4 skipped", "no failure", "met")
    found = [*gpu_check.transfers_of(DOCUMENT), *gpu_check.models_of(MODELS), *gpu_check.verdicts_of(DOCUMENT)]
    status, out = on_a_gpu(tests, found)
    assert status == 0  # a target that is missed is no failure
    lines = out.splitlines()
    assert lines[0].startswith("A GPU, CUDA ")
    for parts in (
        ("async_io op", "1.0 s", "met"), ("gds op", "1.0 s", "met"), ("tests/gpu", "300 passed, 0 failed, 4 skipped", "met"),
        ("1 GiB read, GB/s: host, pinned", "2.00 (1.50 - 2.50)"), ("1 GiB read, GB/s: aio, device", "2.00"),
        ("first read after start-up, s: aio", "0.750"), ("bytes that gds moved directly", "0 of 4096"),
        ("aio / host", "at least 0.9", "met"), ("other / host", "at least 3", "MISSED"),
        ("gds / aio", "-", "not measured: no driver"), ("state of the checkpoints", "7.4 GB"),
        ("load: deepnvme", "1.5 (1.4 - 1.6) s, 2.00 GB/s, 0.10 CPU s a GB, 9 MiB"), ("load: other", "-", "not installed"),
        ("step: deepnvme", "2.5 (2.4 - 2.6) s, 0.50 CPU s"), ("cache", "-", "not seen"),
    ):  # fmt: skip
        assert any(line.startswith(parts[0]) and all(part in line for part in parts) for line in lines), (parts, out)


def test_what_failed_fails_the_check_and_is_in_the_table(gpu_check: ModuleType, on_a_gpu: Callable[..., Any]) -> None:
    status, out = on_a_gpu(gpu_check.Row("tests/gpu", "1 failed", "no failure", "FAILED", failed=True), [])
    assert status == 1
    assert "FAILED" in out
    series = {"contender": "gds", "memory": "device", "failure": "the device is gone", "gb_per_second": None}
    (row, *_) = gpu_check.transfers_of({**DOCUMENT, "workloads": [{"name": "read", "series": [series]}]})
    assert (row.failed, row.result) == (True, "FAILED: the device is gone")
    (_, row) = gpu_check.models_of({**MODELS, "rows": {"save": [["deepnvme", "-", "-", "-", "-", "no room"]]}, "notes": []})
    assert (row.failed, row.result) == (True, "FAILED: no room")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA device")
@pytest.mark.parametrize(
    "command", [[sys.executable, "benchmarks/gpu_check.py"], ["make", "gpu-check", f"PYTHON={sys.executable}"]], ids=str
)
def test_without_a_gpu_it_says_so_in_one_line(command: list[str]) -> None:
    if shutil.which(command[0]) is None:
        pytest.skip(f"needs {command[0]}")
    # As where no other make has begun all this, which this one would answer to.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=PATIENCE, env=environment)
    assert done.returncode != 0
    assert done.stdout == ""
    first, *rest = done.stderr.splitlines()
    assert first.startswith("gpu-check: needs a CUDA device, and ")
    assert all(line.startswith("make") for line in rest)
