"""The benchmark of ds_io and ds_nvme_tune: complete and tidy. Its figures are not looked at."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tuning

pytestmark = pytest.mark.slow


def test_every_target_has_a_line_and_nothing_is_left_behind(drive: Path, document_of: Callable[..., Any]) -> None:
    document = document_of(tuning.main, drive)
    assert len(document["targets"]) == 8
    assert all(target["figure"]["median"] > 0 for target in document["targets"])
    assert document["tuner"]["chosen"]["aio"]["block_size"] > 0
