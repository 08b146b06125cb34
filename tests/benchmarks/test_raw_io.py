"""The benchmark itself: complete, tidy, and honest about what it could not measure. Its figures are not looked at."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import raw_io
from harness import interleave
from harness.targets import best_of
from harness.workloads import Sample

from deepnvme.tools.tune.folder import folder_facts

from ..support.patience import PATIENCE

pytestmark = pytest.mark.slow

RAW_IO = Path(__file__).resolve().parents[2] / "benchmarks" / "raw_io.py"

ROWS = ("rows read", "rows write")
needs_fio = pytest.mark.skipif(shutil.which("fio") is None, reason="needs fio")


@pytest.fixture(scope="module", autouse=True)
def terminated_as_before() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@dataclass(frozen=True)
class Run:
    printed: str
    document: dict[str, Any]
    left_behind: list[str]

    def contenders(self, workload: str) -> set[str]:
        (found,) = (entry for entry in self.document["workloads"] if entry["name"] == workload)
        return {series["contender"] for series in found["series"] if series["samples"]}


@pytest.fixture(scope="module")
def quick(io_dir: Path) -> Run:
    place = io_dir / "raw_io"
    place.mkdir()
    report = io_dir / "raw_io.json"
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert raw_io.main(["--quick", "--rounds", "1", "--dir", str(place), "--json", str(report)]) == 0
    return Run(printed.getvalue(), json.loads(report.read_text()), [path.name for path in place.iterdir()])


def test_both_faces_of_ours_are_measured_on_every_workload(quick: Run) -> None:
    names = [entry["name"] for entry in quick.document["workloads"]]
    assert names == ["read", "overwrite", "fresh", "preallocated", "small read", "small write", *ROWS]
    for name in set(names) - set(ROWS):
        assert {"engine", "handle"} <= quick.contenders(name)


@needs_fio
def test_fio_is_measured_beside_ours(quick: Run) -> None:
    assert "fio" in quick.contenders("read")
    assert "fio" in quick.contenders("small write")


@needs_fio
def test_many_transfers_by_one_call_are_compared_with_the_best_of_fio(quick: Run) -> None:
    targets = [target for target in quick.document["targets"] if "fio's best" in target["what"]]
    assert [target["bound"] for target in targets] == [0.97] * 3 + [0.95] * 3
    assert all(target["figure"] is not None for target in targets)


def test_the_best_of_a_contender_is_that_with_the_highest_median() -> None:
    workload = raw_io.Workload("read", "read", "existing", files=1, nbytes=8, block_size=8)

    def series(memory: str, *seconds: float) -> interleave.Series:
        return interleave.Series("fio", memory, [Sample(8, each, 0.1, None) for each in seconds], "")

    # The last has the best round of all, and the first failed.
    listed = [interleave.Series("fio", "default", [], "broke"), series("huge pages", 2, 2, 2), series("depth 128", 1, 3, 3)]
    best = best_of(interleave.Result(workload, listed), "fio")
    assert best is not None
    assert best.memory == "huge pages"


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
                assert sample["nbytes"] == workload["files"] * workload["tensors"] * workload["nbytes"]
                assert sample["seconds"] > 0
                assert sample["cpu_seconds"] >= 0


def test_an_interrupted_run_removes_its_files(drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(step: str) -> None:
        if "round 1" in step:
            assert any(drive.iterdir())
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(raw_io, "print_step", interrupt)
    with pytest.raises(SystemExit) as end:
        raw_io.main(["--quick", "--rounds", "1000", "--dir", str(drive)])
    assert end.value.code == 130
    assert list(drive.iterdir()) == []


def test_memory_is_no_drive() -> None:
    place = Path("/dev/shm")
    if not place.is_dir() or folder_facts(place).filesystem != "tmpfs":
        pytest.skip("needs a tmpfs at /dev/shm")
    with pytest.raises(SystemExit) as end:
        raw_io.main(["--quick", "--dir", str(place)])
    assert "is tmpfs, in memory, not a drive" in str(end.value.code)
    assert not [name for name in os.listdir(place) if name.startswith("raw_io-")]


def test_a_size_that_is_no_whole_block_is_refused_by_name() -> None:
    done = subprocess.run([sys.executable, RAW_IO, "--size", "1000"], capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 2
    assert "multiple of 1 MiB, got '1000'" in done.stderr
