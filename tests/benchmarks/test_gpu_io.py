"""gpu_io.py with host tensors in the place of the GPU's: complete, tidy, and honest about what it could not measure."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import time
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


def test_a_gds_that_cannot_be_made_is_left_out_with_the_reason(gpu_io: ModuleType, measure: Any) -> None:
    def refuse() -> None:
        raise RuntimeError("gds cannot be used: there is none")

    settings, measurements = measure(refuse)
    assert list(measurements.first_requests) == ["host", "aio", "torch"]
    assert measurements.notes == ["gds left out: gds cannot be used: there is none"]
    judged = gpu_io.verdicts(settings, measurements)
    assert [verdict.met is None for verdict in judged] == [False, True] * 3


def test_memory_that_cannot_be_registered_is_a_note(gpu_io: ModuleType, op: ModuleType, measure: Any) -> None:
    class Full(Gds):
        def pin_device_tensor(self, tensor: torch.Tensor) -> bool:
            raise OSError("more device memory than can be pinned")

    _, measurements = measure(lambda: Full(op))
    assert measurements.notes == ["gds: its tensor is not registered: more device memory than can be pinned"]
    assert "gds" in measurements.first_requests


@pytest.mark.parametrize("method", ["async_pread", "async_pwrite"])
def test_one_that_moves_nothing_is_no_contender(op: ModuleType, measure: Any, method: str) -> None:
    gds = Gds(op)
    setattr(gds, method, lambda tensor, path: 0 if method == "async_pread" else Path(path).touch())
    _, measurements = measure(lambda: gds)
    failures = {result.workload.name: result.find("gds", "device").failure for result in measurements.results}
    broken = ["read"] if method == "async_pread" else ["overwrite", "fresh"]
    assert [name for name, failure in failures.items() if failure] == broken


def test_one_that_fails_is_left_out_with_its_error(op: ModuleType, measure: Any) -> None:
    gds = Gds(op)

    def fail() -> int:
        raise OSError(5, "the device is gone")

    setattr(gds, "wait", fail)  # noqa: B010, mypy takes an assignment for a method's
    _, measurements = measure(lambda: gds)
    assert all("the device is gone" in result.find("gds", "device").failure for result in measurements.results)
    assert all(len(result.find("torch", "device").samples) == ROUNDS for result in measurements.results)


def test_every_write_is_timed_until_it_is_on_stable_storage(
    gpu_io: ModuleType, op: ModuleType, measure: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harness.one_tensor.sync", lambda path: time.sleep(0.1))
    _, measurements = measure(lambda: Gds(op))
    for result in measurements.results:
        slow = [min(sample.seconds for sample in series.samples) >= 0.1 for series in result.series]
        assert slow == [result.workload.operation == "write"] * 4


def test_an_interrupted_run_removes_its_files(op: ModuleType, measure: Any, drive: Path) -> None:
    def interrupt(step: str) -> None:
        if "round" in step:
            assert any(drive.iterdir())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure(lambda: Gds(op), interrupt)
    assert list(drive.iterdir()) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA device")
def test_without_a_gpu_it_says_so_in_one_line() -> None:
    done = subprocess.run([sys.executable, BENCHMARKS / "gpu_io.py"], capture_output=True, text=True, timeout=PATIENCE)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("gpu_io: needs a CUDA device, and PyTorch ")
    assert done.stderr.count("\n") == 1
