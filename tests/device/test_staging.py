"""What device transfers take from the host: a few registered slots for each worker, given back when the engine closes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import deepnvme

from .stand_in import StandIn

MIB = 1 << 20
MOST = 16 * MIB  # of staging, for each worker


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2])
def test_a_large_tensor_takes_no_more_than_the_staging(interpreters: Any, libcuda: Path, drive: Path, threads: int) -> None:
    interpreters.run(f"""
        import ctypes, deepnvme, re
        from tests.device.stand_in import StandIn
        driver = StandIn({str(libcuda)!r})
        torch.cuda.current_stream = driver.current_stream
        def memory(name):
            return int(re.search(name + r":\\s+(\\d+)", open("/proc/self/status").read())[1])
        tensor = driver.tensor(b"\\0" * {256 * MIB})
        driver.delay(0)
        engine = deepnvme.Engine(num_threads={threads})
        before = memory("VmRSS")
        open("/proc/self/clear_refs", "w").write("5")  # the high-water mark starts anew
        engine.write(tensor, {str(drive / "file")!r}).result()
        engine.read(tensor, {str(drive / "file")!r}).result()
        grown = memory("VmHWM") - before
        assert engine.stats().bytes_staged == {2 * 256 * MIB}
        assert driver.most_registered_bytes() <= {threads * MOST}, driver.held()
        assert grown < {threads * MOST // 1024} + 8000, grown
    """).check()


@pytest.mark.parametrize("queue_depth", [1, 4])
def test_staging_is_no_larger_than_what_can_be_under_way(driver: StandIn, drive: Path, queue_depth: int) -> None:
    driver.most_registered_bytes()
    with deepnvme.Engine(queue_depth=queue_depth) as engine:
        engine.write(driver.tensor(bytes(20 * MIB)), drive / "file").result()
        assert engine.stats().bytes_staged == 20 * MIB
    assert 0 < driver.most_registered_bytes() <= queue_depth * MIB


def test_all_is_given_back_though_futures_are_kept(driver: StandIn, backend: Any, drive: Path) -> None:
    before = driver.held()
    tensor = driver.tensor(bytes(3 * MIB + 1))
    with deepnvme.Engine(backend=backend, num_threads=2) as engine:
        with driver.using(driver.stream()) as stream:
            stream.pause(0.05)
            futures = [engine.write(tensor, drive / str(index)) for index in range(10)]
        for future in futures:
            future.result()
        futures.append(engine.read(tensor, drive / "0"))
        futures[-1].result()
        assert driver.held()["live_streams"] > 0
    assert driver.held() == before
    assert all(future.done() for future in futures)


def test_events_are_used_again(driver: StandIn, engine: deepnvme.Engine, drive: Path) -> None:
    tensor, before = driver.tensor(bytes(64 * MIB)), driver.held()["live_events"]
    engine.write(tensor, drive / "file").result()
    assert 0 < driver.held()["live_events"] - before <= MOST // MIB  # one for each slot, not one for each block


def test_nothing_of_cuda_is_touched_for_host_memory(driver: StandIn, backend: Any, drive: Path) -> None:
    before = driver.calls("cuMemHostRegister"), driver.calls("cuStreamCreate"), driver.calls("cuEventCreate")
    with deepnvme.Engine(backend=backend) as engine:
        engine.write(torch.ones(3 * MIB)[1:], drive / "file").result()
    assert (driver.calls("cuMemHostRegister"), driver.calls("cuStreamCreate"), driver.calls("cuEventCreate")) == before


def test_one_ring_serves_the_devices_of_a_machine(driver: StandIn, drive: Path) -> None:
    with deepnvme.Engine() as engine:
        engine.write(driver.tensor(bytes(4096), 0), drive / "file").result()
        once = driver.registered_bytes()
        engine.write(driver.tensor(bytes(4096), 1), drive / "file").result()
        assert driver.registered_bytes() == once > 0
