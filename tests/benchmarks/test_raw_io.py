"""The benchmark itself: complete, tidy, and honest about what it could not measure. Its figures are not looked at."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

RAW_IO = Path(__file__).resolve().parents[2] / "benchmarks" / "raw_io.py"

needs_fio = pytest.mark.skipif(shutil.which("fio") is None, reason="needs fio")


def filesystem(path: Path) -> str:
    return subprocess.run(["stat", "-f", "-c", "%T", path], capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture(scope="module")
def drive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("drive")
    if filesystem(path) in ("tmpfs", "ramfs"):
        pytest.skip("needs a temporary directory on a drive, this one is in memory (set TMPDIR)")
    return path


@dataclass(frozen=True)
class Run:
    printed: str
    document: dict[str, Any]
    left_behind: list[str]

    def contenders(self, workload: str) -> set[str]:
        (found,) = (entry for entry in self.document["workloads"] if entry["name"] == workload)
        return {series["contender"] for series in found["series"] if series["samples"]}


@pytest.fixture(scope="module")
def quick(drive: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    report = tmp_path_factory.mktemp("report") / "raw_io.json"
    done = subprocess.run(
        [sys.executable, RAW_IO, "--quick", "--rounds", "1", "--dir", drive, "--json", report],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return Run(done.stdout, json.loads(report.read_text()), [path.name for path in drive.iterdir()])


def test_both_faces_of_ours_are_measured_on_every_workload(quick: Run) -> None:
    names = [entry["name"] for entry in quick.document["workloads"]]
    assert names == ["read", "overwrite", "fresh", "preallocated", "small read", "small write"]
    for name in names:
        assert {"engine", "handle"} <= quick.contenders(name)


@needs_fio
def test_fio_is_measured_beside_ours(quick: Run) -> None:
    assert "fio" in quick.contenders("read")
    assert "fio" in quick.contenders("small write")


def test_the_directory_is_empty_afterwards(quick: Run) -> None:
    assert quick.left_behind == []


def test_a_target_without_deepspeed_is_neither_met_nor_missed(quick: Run) -> None:
    targets = [target for target in quick.document["targets"] if "DeepSpeed" in target["what"]]
    assert targets
    assert all(target["met"] is None and "deepspeed" in target["note"] for target in targets)
    assert "not measured" in quick.printed


def test_every_sample_has_its_rate_and_its_cost(quick: Run) -> None:
    for workload in quick.document["workloads"]:
        for series in workload["series"]:
            for sample in series["samples"]:
                assert sample["nbytes"] == workload["files"] * workload["nbytes"]
                assert sample["seconds"] > 0
                assert sample["cpu_seconds"] >= 0


def test_an_interrupted_run_removes_its_files(drive: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, RAW_IO, "--quick", "--rounds", "1000", "--dir", drive],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stderr is not None
        try:
            for line in process.stderr:
                if "round 1" in line:
                    break
            assert any(drive.iterdir())
            process.send_signal(signal.SIGINT)
            process.stderr.read()
            assert process.wait(timeout=60) == 130
        finally:
            process.kill()
    assert list(drive.iterdir()) == []


@pytest.mark.skipif(not Path("/dev/shm").is_dir() or filesystem(Path("/dev/shm")) != "tmpfs", reason="needs a tmpfs at /dev/shm")
def test_memory_is_no_drive() -> None:
    before = set(os.listdir("/dev/shm"))
    done = subprocess.run([sys.executable, RAW_IO, "--quick", "--dir", "/dev/shm"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "tmpfs" in done.stderr
    assert not [name for name in set(os.listdir("/dev/shm")) - before if name.startswith("raw_io-")]


def test_a_size_that_is_no_whole_block_is_refused_by_name() -> None:
    done = subprocess.run([sys.executable, RAW_IO, "--size", "1000"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "multiple of 1 MiB, got '1000'" in done.stderr
