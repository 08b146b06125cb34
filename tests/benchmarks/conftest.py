"""Runs of the benchmarks in this process, as small as they can be."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def document_of(capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    """Runs a benchmark below a directory, and returns its document. Each target must have a line, and nothing be left behind."""

    def run(main: Callable[[list[str]], int], directory: Path, *arguments: str) -> dict[str, Any]:
        benchmarked, report = directory / "benchmarked", directory / "report.json"
        benchmarked.mkdir()
        assert main(["--quick", *arguments, "--dir", str(benchmarked), "--json", str(report)]) == 0
        document: dict[str, Any] = json.loads(report.read_text())
        printed = capsys.readouterr().out
        assert all(target["what"] in printed for target in document["targets"])
        assert list(benchmarked.iterdir()) == []
        return document

    return run
