"""The simulated drives of benchmarks/engine_ceiling.py: their arithmetic, and faults that they are given. No time is measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ..support.patience import until

GB_PER_S, IOPS, LATENCY = 14e9, 2.5e6, 60e-6
SECOND = 10**12  # of a drive's clock
KIB, MIB = 1 << 10, 1 << 20
FILE_SIZE = 1 << 30


@pytest.fixture
def model(testing: ModuleType) -> Any:
    return testing.DriveModel(GB_PER_S, IOPS, LATENCY)


@pytest.fixture
def clock(testing: ModuleType, model: Any) -> Any:
    return testing.DriveClock(model)


# -- the clock ---------------------------------------------------------------------------------------------------------


def test_an_idle_drive_takes_its_latency_and_the_time_of_one_operation(clock: Any) -> None:
    begin = 5 * SECOND
    assert clock.completion(begin, 4 * KIB) == pytest.approx(begin + (LATENCY + 1 / IOPS) * SECOND, abs=2)


def test_small_operations_complete_at_the_rate_of_its_iops(clock: Any) -> None:
    first, *_, last = [clock.completion(0, 4 * KIB) for _ in range(100_001)]
    assert 100_000 * SECOND / (last - first) == pytest.approx(IOPS, rel=1e-6)


@pytest.mark.parametrize("nbytes", [64 * KIB, MIB, 4 * MIB])
def test_large_operations_complete_at_the_rate_of_its_bandwidth(clock: Any, nbytes: int) -> None:
    first, *_, last = [clock.completion(0, nbytes) for _ in range(1001)]
    assert 1000 * nbytes * SECOND / (last - first) == pytest.approx(GB_PER_S, rel=1e-6)


def test_what_a_drive_could_have_done_while_idle_is_not_made_up_for(clock: Any) -> None:
    clock.completion(0, MIB)
    begin = 100 * SECOND
    first, *_, last = [clock.completion(begin, MIB) for _ in range(1000)]
    assert first - begin == pytest.approx((LATENCY + MIB / GB_PER_S) * SECOND, rel=1e-6)
    assert last - begin == pytest.approx((LATENCY + 1000 * MIB / GB_PER_S) * SECOND, rel=1e-6)


# -- drives under load -------------------------------------------------------------------------------------------------


@pytest.fixture
def paths(tmp_path: Path) -> list[str]:
    """A file for each of two drives."""
    files = [tmp_path / "0", tmp_path / "1"]
    for file in files:
        with file.open("wb") as sparse:
            sparse.truncate(FILE_SIZE)
    return [str(file) for file in files]


@pytest.fixture(params=["sleeping", "polling", "one request", "requests of one block"])
def load(request: pytest.FixtureRequest, testing: ModuleType, paths: list[str]) -> Iterator[Callable[[list[Any]], Any]]:
    """Starts a load on two drives: without the engine, and with it."""
    loads = []

    def start(drives: list[Any]) -> Any:
        if request.param in ("sleeping", "polling"):
            loads.append(testing.BareLoad(drives, MIB, depth=8, polling_threads=int(request.param == "polling")))
        else:
            single = request.param == "requests of one block"
            loads.append(testing.EngineLoad(drives, paths, FILE_SIZE, MIB, depth=8, workers=2, single_blocks=single))
        return loads[-1]

    yield start
    for each in loads:
        each.stop()


@pytest.fixture
def drives(testing: ModuleType, model: Any) -> list[Any]:
    return [testing.SimulatedDrive(model) for _ in range(2)]


def test_a_failing_drive_completes_operations_and_moves_nothing(load: Callable[[list[Any]], Any], drives: list[Any]) -> None:
    drives[0].become("failing")
    load(drives)
    until(lambda: drives[0].operations > 0 and drives[1].bytes > 0)
    assert drives[0].bytes == 0


def test_a_hanging_drive_completes_nothing_until_it_is_healthy_again(load: Callable[[list[Any]], Any], drives: list[Any]) -> None:
    drives[0].become("hanging")
    load(drives)
    until(lambda: drives[1].bytes > 0)
    assert drives[0].operations == 0
    drives[0].become("healthy")
    until(lambda: drives[0].bytes > 0)


def test_coalesced_completions_never_wait_for_operations_that_nobody_submitted(
    testing: ModuleType, load: Callable[[list[Any]], Any]
) -> None:
    drives = [testing.SimulatedDrive(testing.DriveModel(GB_PER_S, IOPS, LATENCY, coalesced=1000)) for _ in range(2)]
    load(drives)
    until(lambda: all(drive.bytes >= 40 * MIB for drive in drives))
