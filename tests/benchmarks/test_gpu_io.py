"""gpu_io.py with host tensors in the place of the GPU's: complete, tidy, and honest about what it could not measure."""

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

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
SIZE = (3 << 20) + 5
ROUNDS = 2
EVERYONE = ["host", "aio", "gds", "torch"]


@pytest.fixture
def gpu_io(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("gpu_io")


class Gds:
    """A handle that passes for a gds_handle. ``fallbacks``: why nothing goes directly."""

    def __init__(self, op: ModuleType, fallbacks: dict[str, int] | None = None) -> None:
        self._handle, self._fallbacks = op.aio_handle(), fallbacks or {}
        self.pinned: list[torch.Tensor] = []

    def pin_device_tensor(self, tensor: torch.Tensor) -> bool:
        self.pinned.append(tensor)
        return True

    def stats(self) -> dict[str, Any]:
        stats = self._handle.stats()
        return {**stats, "bytes_gds": 0 if self._fallbacks else stats["bytes_direct"], "fallbacks": self._fallbacks}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handle, name)


@pytest.fixture
def measure(gpu_io: ModuleType, drive: Path) -> Callable[..., tuple[Any, Any]]:
    """Settings and measurements of a small run."""

    def measure(make_gds: Callable[[], Any], progress: Callable[[str], None] = lambda step: None) -> tuple[Any, Any]:
        settings = gpu_io.Settings(drive, SIZE, ROUNDS)
        return settings, gpu_io.measure(settings, torch.device("cpu"), progress, make_gds)

    return measure


def test_everyone_is_measured_in_each_round_and_the_first_request_is_told_apart(
    gpu_io: ModuleType, op: ModuleType, measure: Any, drive: Path
) -> None:
    gds = Gds(op)
    settings, measurements = measure(lambda: gds)
    assert [result.workload.name for result in measurements.results] == ["read", "overwrite", "fresh"]
    for result in measurements.results:
        assert [series.name for series in result.series] == EVERYONE
        assert [series.failure for series in result.series] == [""] * 4
        for series in result.series:
            assert [sample.nbytes for sample in series.samples] == [SIZE] * ROUNDS
            assert all(sample.seconds > 0 for sample in series.samples)
    assert list(measurements.first_requests) == EVERYONE
    assert all(seconds > 0 for seconds in measurements.first_requests.values())
    assert [tensor.nbytes for tensor in gds.pinned] == [SIZE]
    assert list(drive.iterdir()) == []

    judged = gpu_io.verdicts(settings, measurements)
    assert [(verdict.bound, verdict.met is not None) for verdict in judged] == [(0.9, True), (1.0, True)] * 3
    text = gpu_io.report(settings, measurements)
    assert text.count("MISSED") + text.count(" met") == 6
    assert "First read after start-up" in text
    document = json.loads(json.dumps(gpu_io.as_json(settings, measurements, torch.device("cpu"), "today")))
    assert document["first_request_seconds"] == measurements.first_requests
    assert document["gds"]["bytes_gds"] > 0
    assert [len(workload["series"]) for workload in document["workloads"]] == [4, 4, 4]


def test_a_gds_that_goes_through_the_host_is_measured_but_not_judged(gpu_io: ModuleType, op: ModuleType, measure: Any) -> None:
    settings, measurements = measure(lambda: Gds(op, {"the driver is not loaded": 3}))
    judged = [verdict for verdict in gpu_io.verdicts(settings, measurements) if "gds" in verdict.what]
    assert [(verdict.met, verdict.note) for verdict in judged] == [(None, "the driver is not loaded")] * 3
    assert "note: gds: the driver is not loaded" in gpu_io.report(settings, measurements)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA device")
def test_without_a_gpu_it_says_so_in_one_line() -> None:
    done = subprocess.run([sys.executable, BENCHMARKS / "gpu_io.py"], capture_output=True, text=True, timeout=PATIENCE)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("gpu_io: needs a CUDA device, and PyTorch ")
    assert done.stderr.count("\n") == 1
