"""The benchmark of KV caches: complete, tidy, and of the same tokens. Its figures are not looked at."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

pytest.importorskip("transformers", reason="needs transformers, to make a Llama: pip install transformers")

import kv_generation  # noqa: E402


def test_every_target_has_a_line_and_nothing_is_left_behind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drive = tmp_path / "drive"
    drive.mkdir()
    report = tmp_path / "report.json"
    assert kv_generation.main(["--quick", "--rounds", "1", "--dir", str(drive), "--json", str(report)]) == 0
    document = json.loads(report.read_text())
    printed = capsys.readouterr().out
    assert all(target["what"] in printed for target in document["targets"])
    assert [target["met"] for target in document["targets"][-3:]] == [True] * 3
    (on_drive,) = document["turns"]["samples"][kv_generation.NVME]
    assert on_drive["bytes_written"] > 0
    assert on_drive["bytes_read"] > 0
    assert list(drive.iterdir()) == []
