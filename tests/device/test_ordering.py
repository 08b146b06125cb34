"""A transfer comes after what its device's current stream had been given before the call, and waits for nothing else."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import deepnvme

from ..support.memory import Guarded, page_aligned, pattern
from .stand_in import StandIn

OLD, NEW = pattern(500_001, 1), pattern(500_001, 2)
SOON = 0.15  # seconds: what does not wait for it is seen
PLENTY = 60.0  # nothing takes as long that waits for nothing


@pytest.fixture
def engine() -> Iterator[deepnvme.Engine]:
    with deepnvme.Engine(block_size=65536) as engine:
        yield engine


def test_a_read_does_not_disturb_what_reads_the_tensor_before(driver: StandIn, engine: deepnvme.Engine, drive: Path) -> None:
    (drive / "file").write_bytes(NEW)
    tensor, seen = driver.tensor(OLD), (ctypes.c_char * len(OLD))()
    with driver.using(driver.stream()) as stream:
        stream.pause(SOON)
        stream.copy_to(seen, tensor, 0)
        engine.read(tensor, drive / "file").result()
        stream.finish()
    assert seen.raw == OLD
    assert driver.content(tensor) == NEW


def test_a_read_is_not_overwritten_by_what_was_computed_before(driver: StandIn, engine: deepnvme.Engine, drive: Path) -> None:
    (drive / "file").write_bytes(NEW)
    tensor = driver.tensor(bytes(len(OLD)))
    with driver.using(driver.stream()) as stream:
        stream.fill(tensor, OLD, SOON)
        engine.read(tensor, drive / "file").result()
        stream.finish()
    assert driver.content(tensor) == NEW


def test_a_read_is_on_the_device_when_its_future_is_done(driver: StandIn, engine: deepnvme.Engine, drive: Path) -> None:
    (drive / "file").write_bytes(NEW)
    tensor = driver.tensor(bytes(len(NEW)))
    driver.delay(0.02)
    engine.read(tensor, drive / "file").result()
    assert driver.content(tensor) == NEW


def test_each_device_has_its_own_current_stream(driver: StandIn, engine: deepnvme.Engine, drive: Path) -> None:
    tensors = [driver.tensor(OLD, device) for device in range(3)]
    with driver.using(driver.stream(0)) as first, driver.using(driver.stream(2)) as third:
        first.fill(tensors[0], NEW, SOON)
        third.fill(tensors[2], NEW, SOON / 2)
        for future in [engine.write(tensor, drive / str(index)) for index, tensor in enumerate(tensors)]:
            future.result()
    assert [(drive / str(index)).read_bytes() for index in range(3)] == [NEW, OLD, NEW]


def test_the_requests_of_a_stream_see_each_its_own_moment(driver: StandIn, engine: deepnvme.Engine, drive: Path) -> None:
    tensors = [driver.tensor(OLD) for _ in range(5)]
    with driver.using(driver.stream()) as stream:
        futures = []
        for index, tensor in enumerate(tensors):
            stream.fill(tensor, pattern(len(OLD), index), SOON / 5)
            futures.append(engine.write(tensor, drive / str(index)))
        for future in futures:
            future.result()
    assert [(drive / str(index)).read_bytes() for index in range(5)] == [pattern(len(OLD), index) for index in range(5)]


@pytest.mark.parametrize(("queue_depth", "direction"), [(1, "read"), (1, "write"), (128, "write")])
def test_requests_behind_slow_work_keep_no_others_waiting(
    driver: StandIn, backend: Any, drive: Path, queue_depth: int, direction: str
) -> None:
    """More of them than the staging holds; others of the host, of another stream, of another device, both ways."""
    (drive / "file").write_bytes(bytes(20 << 20))
    (drive / "other").write_bytes(OLD)
    slow = driver.tensor(bytes(20 << 20))
    with deepnvme.Engine(backend=backend, queue_depth=queue_depth) as engine:
        with driver.stream().held() as stream:
            with driver.using(stream):
                held_up = getattr(engine, direction)(slow, drive / "file")
            with driver.using(driver.stream()):
                others = [
                    engine.write(page_aligned(NEW), drive / "0"),
                    engine.write(Guarded(NEW, 1).tensor, drive / "1"),
                    engine.write(driver.tensor(NEW), drive / "2"),
                    engine.write(driver.tensor(NEW, 1), drive / "3"),
                    engine.read(driver.tensor(NEW), drive / "other"),
                ]
                for other in others:
                    other.result(PLENTY)
            assert not held_up.done()
        held_up.result(PLENTY)


def test_a_flush_covers_a_write_that_waits_for_its_stream(driver: StandIn, engine: deepnvme.Engine, drive: Path) -> None:
    tensor = driver.tensor(OLD)
    with driver.using(driver.stream()) as stream:
        stream.fill(tensor, NEW, SOON)
        write = engine.write(tensor, drive / "file")
        engine.fsync(drive / "file").result()
    assert write.done()
    assert (drive / "file").read_bytes() == NEW
