"""Signals whose handlers raise, where half a change would be worse than a moment's wait."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest
import torch

from deepnvme.swap.interrupts import held_back
from tests.faults.torture.interruption import Interruption

from .training import assert_same, assert_same_state, give_gradients, optimizer_in, parameters


class TimeIsUp(Exception):
    pass


def up(number: int, frame: FrameType | None) -> None:
    raise TimeIsUp(number)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = {number: signal.signal(number, up) for number in (signal.SIGUSR1, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM, signal.SIGINT])
def test_a_signal_whose_handler_raises_is_held_back_and_raised_at_the_end(number: signal.Signals) -> None:
    called = []
    with pytest.raises((TimeIsUp, KeyboardInterrupt)), held_back():
        called = [signal.raise_signal(each) for each in (number, number)]
    assert called == [None, None]
    assert [signal.getsignal(each) for each in (signal.SIGUSR1, signal.SIGTERM)] == [up, up]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_of_several_signals_each_handler_is_called() -> None:
    called: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, frame: called.append(number))
    with pytest.raises((KeyboardInterrupt, TimeIsUp)), held_back():
        _ = [signal.raise_signal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)]
    assert called == [signal.SIGUSR1]
    assert signal.getsignal(signal.SIGTERM) is up


def test_other_threads_hold_nothing_back() -> None:
    def in_a_thread() -> None:
        with held_back():
            assert signal.getsignal(signal.SIGTERM) is up

    thread = threading.Thread(target=in_a_thread)
    thread.start()
    thread.join()


def test_a_step_of_what_stays_in_memory_is_made_or_undone_whatever_signal_comes(drive: Path) -> None:
    """What is stepped in memory has no second copy."""
    params, plain = parameters(), parameters()
    optimizer = optimizer_in(drive, params, lr=1e-2, fused=True, dram_budget=1 << 40)
    reference = torch.optim.AdamW(plain, lr=1e-2, fused=True)
    skip = (str(Path(torch.__file__).parent),)
    steps = 0

    def step(number: int) -> int:
        nonlocal steps
        give_gradients(params, steps)
        give_gradients(plain, steps)
        reference.step()
        steps += 1
        interruption = Interruption(number, skip, by=signal.SIGUSR1)
        try:
            with interruption:
                optimizer.step()
        except TimeIsUp:
            pass
        if optimizer.steps < steps:
            optimizer.step()
        assert optimizer.steps == steps, interruption.where
        assert_same(params, plain)
        return interruption.passed

    for _ in range(2):
        step(0)
    points = step(0)
    for number in range(1, points + 1, max(points // 60, 1)):
        step(number)
    assert_same_state(optimizer.state_dict(), reference.state_dict())
    optimizer.close()
