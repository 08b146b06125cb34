"""What device transfers take from the host: a few registered slots for each worker, given back when the engine closes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

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
