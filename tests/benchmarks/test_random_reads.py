"""The benchmark of random reads: complete and tidy. Its figures are not looked at."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import random_reads

pytestmark = pytest.mark.slow


def test_every_target_has_a_figure_or_says_why_not(drive: Path, document_of: Callable[..., Any]) -> None:
    document = document_of(random_reads.main, drive)
    measured = [target["figure"] is not None for target in document["targets"]]
    assert measured == ([True, True, True] if shutil.which("fio") else [False, True, False])
    for samples in document["comparison"]["samples"].values():
        assert len(samples) == 2
        assert all(sample["reads"] > 0 and sample["seconds"] > 0 for sample in samples)


def test_without_fio_its_targets_are_neither_met_nor_missed(
    drive: Path, document_of: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda program: None)
    document = document_of(random_reads.main, drive)
    assert [target["met"] is None for target in document["targets"]] == [True, False, True]
