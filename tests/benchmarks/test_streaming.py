"""The benchmark of streaming: complete, tidy, and clear about what could not be compared. Its figures are not looked at."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import streaming
from harness.streaming_worker import StreamingWorker
from harness.workloads import ContenderFailed

pytestmark = pytest.mark.slow

pytest.importorskip("transformers", reason="needs transformers, to make a Llama: pip install transformers")


def test_every_target_has_a_line_and_nothing_is_left_behind(tmp_path: Path, document_of: Callable[..., Any]) -> None:
    document = document_of(streaming.main, tmp_path, "--rounds", "1", "--only", "build", "--only", "identity")
    built, *identical = document["targets"]
    assert built["figure"]["median"] > 0
    assert [target["met"] for target in identical] == [True, True]


def test_a_library_that_is_not_installed_takes_no_part(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    worker = StreamingWorker(kind="accelerate", shape={"width": 128, "layers": 1, "vocabulary": 10}, weights=str(tmp_path))
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(ContenderFailed, match="not run: install accelerate"):
        worker.start()


def test_what_limits_a_pass_is_pointed_out() -> None:
    bounds = [("drive", streaming.Spread.of([0.5])), ("memory", streaming.Spread.of([2.0]))]
    measured = streaming.Measurements(bounds={"forward": bounds})
    lines = streaming.bounds_table(measured).splitlines()
    assert [line.endswith("the limit") for line in lines if line.startswith("forward")] == [False, True]
