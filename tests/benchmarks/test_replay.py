"""The benchmark of replay buffers: complete and tidy. Its figures are not looked at."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import replay

pytestmark = pytest.mark.slow


def test_every_target_has_a_figure(drive: Path, document_of: Callable[..., Any]) -> None:
    pytest.importorskip("torchrl", reason="needs torchrl: pip install torchrl==0.14.1")
    document = document_of(replay.main, drive)
    assert [target["figure"] is not None for target in document["targets"]] == [True] * 3
    for comparison in document["comparisons"].values():
        for samples in comparison["samples"].values():
            assert all(sample["rate"] > 0 for sample in samples)
