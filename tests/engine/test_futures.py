"""A request's end, however it comes: waited for, timed out, interrupted, forgotten."""

from __future__ import annotations

import errno
import gc
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import deepnvme

from ..support.memory import page_aligned, pattern
from ..support.patience import PATIENCE, until

Faulty = Callable[..., Any]


@pytest.fixture
def held(faulty: Faulty, gate: Any, backend: Any) -> Any:
    """An engine whose requests do not end before the gate is opened."""
    return faulty(backend, gate=gate)


@pytest.fixture
def broken(faulty: Faulty) -> Any:
    """An engine whose every transfer fails."""
    return faulty("threads", error_every=1, error=errno.EIO)


def test_a_timeout_is_an_error_and_the_request_goes_on(held: Any, gate: Any, drive: Path) -> None:
    content = pattern(10_000)
    future = held.write(page_aligned(content), drive / "file")
    for wait in (future.result, future.exception):
        with pytest.raises(TimeoutError, match=r"write of 10000 bytes at offset 0 has not ended within 0.05 s"):
            wait(0.05)
    gate.release()
    assert future.result() == 10_000
    assert future.exception() is None
    assert (drive / "file").read_bytes() == content


def test_a_request_that_failed_raises_each_time_it_is_asked(broken: Any, drive: Path) -> None:
    future = broken.write(page_aligned(b"x" * 4096), drive / "file")
    for _ in range(2):
        with pytest.raises(OSError, match="write of 4096 bytes at offset 0") as caught:
            future.result()
        assert (caught.value.errno, caught.value.filename) == (errno.EIO, str(drive / "file"))
    assert str(future.exception()) == str(caught.value)
    assert future.done()


def test_done_turns_true_at_the_end_and_not_before(held: Any, gate: Any, drive: Path) -> None:
    future = held.write(page_aligned(b"x"), drive / "file")
    time.sleep(0.05)
    before = future.done()
    gate.release()
    future.result()
    assert (before, future.done()) == (False, True)


def test_other_threads_run_while_one_waits(held: Any, gate: Any, drive: Path) -> None:
    future = held.write(page_aligned(b"x"), drive / "file")
    threading.Timer(0.1, gate.release).start()  # would never run if the waiting kept the interpreter's lock
    assert future.result() == 1


@pytest.mark.parametrize("wait", [
    pytest.param(lambda engine, future: future.result(), id="result"),
    pytest.param(lambda engine, future: future.result(PATIENCE), id="result with a timeout"),
    pytest.param(lambda engine, future: future.exception(), id="exception"),
    pytest.param(lambda engine, future: engine.close(), id="close"),
])  # fmt: skip
@pytest.mark.alone
def test_ctrl_c_interrupts_the_waiting_and_not_the_request(
    faulty: Faulty, gate: Any, drive: Path, wait: Callable[[Any, Any], object]
) -> None:
    content = pattern(10_000)
    engine = faulty("threads", gate=gate)
    future = engine.write(page_aligned(content), drive / "file")
    sent: list[float] = []

    def press() -> None:
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    threading.Timer(0.1, press).start()
    with pytest.raises(KeyboardInterrupt):
        wait(engine, future)
    assert time.monotonic() - sent[0] < 1
    gate.release()
    assert future.result() == 10_000
    assert engine.write(page_aligned(content), drive / "file", 10_000).result() == 10_000  # and the engine is not closed
    assert (drive / "file").read_bytes() == content * 2


def test_a_tensor_lives_while_its_request_does_though_the_future_is_dropped(held: Any, gate: Any, drive: Path) -> None:
    tensor = page_aligned(b"x" * 4096)
    alive = weakref.ref(tensor.untyped_storage())
    held.write(tensor, drive / "file")
    del tensor
    gc.collect()
    assert alive() is not None
    gate.release()
    held.close()
    assert (drive / "file").read_bytes() == b"x" * 4096


def test_a_tensor_whose_future_is_dropped_is_let_go_when_its_request_ends(held: Any, gate: Any, drive: Path) -> None:
    """Without another call of the engine: what a stream reads ahead may be the last that is ever asked of it."""
    tensor = page_aligned(b"x" * 4096)
    alive = weakref.ref(tensor.untyped_storage())
    held.write(tensor, drive / "file")
    del tensor
    gate.release()
    until(lambda: alive() is None)


def test_the_copy_of_a_tensor_that_is_not_contiguous_lives_as_long_as_the_request(held: Any, gate: Any, drive: Path) -> None:
    tensor = torch.arange(20_000, dtype=torch.int32)[::2]
    future = held.write(tensor, drive / "file")
    expected = tensor.clone()
    tensor.zero_()  # the copy is what is written
    del tensor
    other = [torch.full((10_000,), -1, dtype=torch.int32) for _ in range(20)]  # would land in the copy's place
    gate.release()
    future.result()
    assert torch.frombuffer(bytearray((drive / "file").read_bytes()), dtype=torch.int32).equal(expected)
    assert len(other) == 20


@pytest.mark.parametrize("count", [1, 3])
def test_the_end_of_a_with_block_waits_for_everything(drive: Path, backend: Any, count: int) -> None:
    content = pattern(1 << 20)
    with deepnvme.Engine(backend=backend, num_threads=count) as engine:
        for index in range(20):
            engine.write(page_aligned(content), drive / str(index))
    assert all((drive / str(index)).read_bytes() == content for index in range(20))
