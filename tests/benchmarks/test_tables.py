"""The benchmark of tables: complete and tidy. Its figures are not looked at, but for what must be the same bits."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tables

pytestmark = pytest.mark.slow


def test_every_target_has_a_figure_or_says_why_not(drive: Path, document_of: Callable[..., Any]) -> None:
    document = document_of(tables.main, drive)
    targets = {target["what"]: target for target in document["targets"]}
    for what, target in targets.items():
        others = ("datasets", "lance", "fio")
        assert target["figure"] is not None or any(each in what for each in others), what
    assert len(targets) == 2 + len(tables.OTHERS) + 2 + 2 + 2 + 1 + 1
    differing = [target for what, target in targets.items() if "losses that differ" in what]
    (killed,) = (target for what, target in targets.items() if "kills while training" in what)
    assert len(differing) == 2
    assert all(target["met"] for target in differing)
    assert killed["met"]
    if shutil.which("fio"):
        assert all(target["figure"] is not None for what, target in targets.items() if "fio" in what)
