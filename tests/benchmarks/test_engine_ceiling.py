"""The benchmark of the engine alone: each part complete and tidy. Its figures are not looked at."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import engine_ceiling
import pytest

from ..support.patience import PATIENCE

pytestmark = pytest.mark.slow

ENGINE_CEILING = Path(__file__).resolve().parents[2] / "benchmarks" / "engine_ceiling.py"


@pytest.fixture(autouse=True)
def terminated_as_before() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def test_blocks_per_second_are_measured_with_a_backend_that_completes_at_once(
    document_of: Callable[..., dict[str, Any]], drive: Path
) -> None:
    document = document_of(engine_ceiling.main, drive, "--only", "completing")
    rates = {(figure["case"], figure["blocks"]): figure["blocks_per_s"] for figure in document["completing"]}
    assert rates["queued requests of one block", 1000][0] > 0
    assert [target["bound"] for target in document["targets"]] == [5, 3]
    assert document["drives"] is document["neighbours"] is None


def test_drives_are_measured_with_the_engine_and_without_it_and_drawn(
    document_of: Callable[..., dict[str, Any]], drive: Path
) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib")
    plot = drive / "plot.png"
    document = document_of(engine_ceiling.main, drive, "--only", "drives", "--plot", str(plot))
    assert {(point["drives"], point["block_size"]) for point in document["drives"]} == {
        (drives, size) for drives in (1, 8) for size in (4096, 1 << 20)
    }
    for point in document["drives"]:
        for contender in ("engine", "sleeping", "polling"):
            (rate,) = point[contender]
            assert len(rate["gb_per_s"]) == point["drives"]
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert len(document["targets"]) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cores", "1,100000"], "cores, got '1,100000'"),
        (["--only", "completing", "--plot", "plot.png"], "--plot draws the drives, which --only leaves out"),
        (["--plot", "nowhere/plot.png"], "'nowhere' is not a directory"),
    ],
)
def test_what_cannot_be_measured_or_drawn_is_refused_at_once(arguments: list[str], message: str) -> None:
    done = subprocess.run([sys.executable, ENGINE_CEILING, *arguments], capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 2
    assert message in done.stderr
