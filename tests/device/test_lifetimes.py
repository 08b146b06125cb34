"""Engines that close, are dropped, interrupted or forked with device requests under way; machines without CUDA."""

from __future__ import annotations

import os
import signal
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import deepnvme

from ..support.memory import EXCHANGES, pattern
from .stand_in import StandIn

CONTENT = pattern(3_000_001)
PAUSE = 0.2


@pytest.fixture
def preamble(libcuda: Path) -> str:
    """For a program that is to have the stand-in."""
    return f"""
import gc, os, signal, sys, threading, time, deepnvme
from tests.device.stand_in import StandIn
driver = StandIn({str(libcuda)!r})
torch.cuda.current_stream = driver.current_stream
"""


def test_closing_waits_for_what_is_under_way(driver: StandIn, backend: Any, drive: Path) -> None:
    tensors = [driver.tensor(CONTENT) for _ in range(10)]
    engine = deepnvme.Engine(backend=backend)
    with driver.using(driver.stream()) as stream:
        stream.pause(PAUSE)
        for index, tensor in enumerate(tensors):
            engine.write(tensor, drive / str(index))
    engine.close()
    assert all((drive / str(index)).read_bytes() == CONTENT for index in range(10))
    with pytest.raises(ValueError, match="the engine is closed"):
        engine.write(tensors[0], drive / "late")


@pytest.mark.parametrize("exchange", EXCHANGES.values(), ids=EXCHANGES)
@pytest.mark.parametrize("kind", ["engine", "handle"])
def test_the_memory_of_the_call_is_transferred_though_the_tensor_is_given_other_memory(
    driver: StandIn, op: ModuleType, drive: Path, kind: str, exchange: Callable[[Any, Any], object]
) -> None:
    (drive / "file").write_bytes(CONTENT)
    tensors = [driver.tensor(CONTENT), driver.tensor(bytes(len(CONTENT)))]
    memory = [weakref.ref(tensor.untyped_storage()) for tensor in tensors]
    engine, handle = deepnvme.Engine(), op.aio_handle()
    with driver.stream().held() as stream, driver.using(stream):
        if kind == "engine":
            engine.write(tensors[0], drive / "written")
            engine.read(tensors[1], drive / "file")
        else:
            handle.pwrite(tensors[0], drive / "written", True, True)
            handle.pread(tensors[1], drive / "file", True, True)
        for tensor in tensors:
            exchange(tensor, driver.tensor(b"!"))
        read = memory[1]()
        assert read is not None
    engine.close()
    handle.wait()
    assert [driver.content(tensor) for tensor in tensors] == [b"!", b"!"]
    assert (drive / "written").read_bytes() == driver.content(tensor.set_(read)) == CONTENT  # type: ignore[call-overload]
    del tensors, tensor, read
    assert [each() for each in memory] == [None, None]


def test_closing_while_others_submit_loses_nothing(driver: StandIn, drive: Path) -> None:
    """What was taken is done; what was not says that the engine is closed."""
    tensor = driver.tensor(CONTENT[:20_000])
    engine = deepnvme.Engine()
    taken: list[str] = []

    def submit(name: str) -> None:
        for index in range(1000):
            try:
                engine.write(tensor, drive / f"{name}{index}")
            except ValueError:
                return
            taken.append(f"{name}{index}")

    threads = [threading.Thread(target=submit, args=(name,)) for name in "ab"]
    with driver.using(driver.stream()) as stream:
        for thread in threads:
            thread.start()
        for _ in range(20):
            stream.pause(0.002)
            time.sleep(0.001)
        engine.close()
        for thread in threads:
            thread.join()
    assert taken
    assert all((drive / name).read_bytes() == CONTENT[:20_000] for name in taken)


@pytest.mark.parametrize("wait", ["future.result()", "engine.close()", "handle.wait()"])
def test_ctrl_c_interrupts_a_wait_for_slow_work_and_nothing_else(driver: StandIn, op: ModuleType, drive: Path, wait: str) -> None:
    engine, handle, tensor = deepnvme.Engine(), op.aio_handle(), driver.tensor(CONTENT)
    with driver.stream().held() as stream:
        with driver.using(stream):
            future = engine.write(tensor, drive / "engine's")
            handle.async_pwrite(tensor, str(drive / "handle's"))
        timer = threading.Timer(PAUSE / 2, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            eval(wait, {"future": future, "engine": engine, "handle": handle})
        timer.join()
        assert not future.done()
    assert (future.result(), handle.wait()) == (len(CONTENT), 1)
    engine.close()
    assert (drive / "engine's").read_bytes() == (drive / "handle's").read_bytes() == CONTENT


@pytest.mark.parametrize("busy", [False, True])
def test_a_forked_child_leaves_the_driver_alone(interpreters: Any, preamble: str, drive: Path, busy: bool) -> None:
    """Whatever it drops: the handles are its parent's, and the locks are as they were at the fork."""
    interpreters.run(preamble + f"""
torch.cuda.is_initialized, torch.cuda.current_device = lambda: True, lambda: 0
engine, handle = deepnvme.Engine(), op.aio_handle()
pinned = engine.empty_pinned(10_000)
tensor, path, stream = driver.tensor(bytes(100_000)), {str(drive / "file")!r}, driver.stream()
current = driver.using(stream)
current.__enter__()
done = engine.write(tensor, path)
done.result()
stop = threading.Event()
def work():
    while not stop.is_set():
        engine.write(tensor, path).result()
threads = [threading.Thread(target=work, daemon=True) for _ in range(2 * {busy})]
for thread in threads:
    thread.start()
for _ in range(5):
    stream.pause(0.01)
    pending = engine.write(tensor, path)
    handle.async_pwrite(tensor, path)
    driver.call("lock")  # whatever calls it in the child waits for ever
    pid = os.fork()
    if pid != 0:
        driver.call("unlock")
    else:
        del pending, done, pinned, engine, handle
        gc.collect()
        os._exit(7)
    for _ in range(20_000):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            break
        time.sleep(0.01)
    else:
        os.kill(pid, signal.SIGKILL)
        raise AssertionError("the child hangs")
    assert os.waitstatus_to_exitcode(status) == 7, status
    pending.result()
stop.set()
for thread in threads:
    thread.join()
assert handle.wait() == 5
engine.close()
""").check()  # fmt: skip


# -- without CUDA

LOST = """
import deepnvme
class Lost(torch.Tensor):
    is_cpu, is_cuda = property(lambda self: False), property(lambda self: True)
    def get_device(self):
        return 0
class Stream:
    cuda_stream = 0
torch.cuda.current_stream = lambda device: Stream
lost = torch.zeros(5000).as_subclass(Lost)
engine = deepnvme.Engine()
def refusal(path):
    try:
        engine.write(lost, path)
    except RuntimeError as error:
        assert "\\n" not in str(error)
        return str(error)
    return "none"
"""


def test_without_libcuda_a_cuda_tensor_is_one_clear_error(interpreters: Any, libcuda: Path, drive: Path) -> None:
    """``libcuda`` is asked for only so that this is skipped where there is a real one."""
    interpreters.run(LOST + f"""
text = refusal({str(drive / "file")!r})
assert text.startswith("CUDA is not to be had: ") and ("libcuda.so.1" in text or "cuInit" in text), text
assert engine.write(torch.ones(1000), {str(drive / "file")!r}).result() == 4000
""").check()  # fmt: skip
