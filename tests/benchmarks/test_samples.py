"""The benchmark of samples: complete and tidy. Its figures are not looked at."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("PIL")
samples = pytest.importorskip("samples")

pytestmark = pytest.mark.slow


def test_every_target_has_a_figure_or_says_why_not(drive: Path, document_of: Callable[..., Any]) -> None:
    document = document_of(samples.main, drive)
    assert len(document["targets"]) == 5 * len(samples.SIZES) + 2 + 1
    for target in document["targets"]:
        assert (target["figure"] is not None) == ("fio" not in target["what"] or shutil.which("fio") is not None)
