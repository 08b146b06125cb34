"""The benchmark of simulated accelerators: complete and tidy. Its figures are not looked at."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("PIL")
accelerators = pytest.importorskip("accelerators")

pytestmark = pytest.mark.slow


def test_each_model_has_the_figures_of_both_loaders(drive: Path, document_of: Callable[..., Any]) -> None:
    found = document_of(accelerators.main, drive)["accelerators"]
    assert found.keys() == accelerators.MODELS.keys()
    for contenders in found.values():
        assert contenders.keys() == {"torch's loader, 1 workers", "deepnvme"}
        for each in contenders.values():
            assert each["samples_per_second"] > 0
            assert (each["accelerators"] > 0) == (each["utilisation"] >= accelerators.BUSY)
