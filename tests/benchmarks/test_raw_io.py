"""The benchmark itself: complete, tidy, and honest about what it could not measure. Its figures are not looked at."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import raw_io

pytestmark = pytest.mark.slow


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
