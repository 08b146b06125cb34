"""ds_io measures GPU memory by each of its ways, and finds the right bytes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ..support.patience import PATIENCE

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("direction", ["--read", ""])
@pytest.mark.parametrize("way", ["", "--slow_bounce_buffer", "--use_gds", "--engine=torch_io", "--engine=torch_fastio"])
def test_ds_io_moves_gpu_memory(drive: Path, request: pytest.FixtureRequest, way: str, direction: str) -> None:
    if way == "--use_gds":
        request.getfixturevalue("gds")
    more = [option for option in (way, direction) if option]
    command = [sys.executable, "-m", "deepnvme.tune.io", "--folder", str(drive), "--io_size", "8M", "--gpu"]
    command += ["--validate", *more]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
