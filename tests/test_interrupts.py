"""Signals whose handlers raise, where half a change would be worse than a moment's wait."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Iterator
from types import FrameType

import pytest

from deepnvme._interrupts import defer_interrupts

from .support.interpreters import Interpreters


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
    with pytest.raises((TimeIsUp, KeyboardInterrupt)), defer_interrupts():
        called = [signal.raise_signal(each) for each in (number, number)]
    assert called == [None, None]
    assert [signal.getsignal(each) for each in (signal.SIGUSR1, signal.SIGTERM)] == [up, up]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_of_several_signals_each_handler_is_called() -> None:
    called: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, frame: called.append(number))
    with pytest.raises((KeyboardInterrupt, TimeIsUp)), defer_interrupts():
        _ = [signal.raise_signal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)]
    assert called == [signal.SIGUSR1]
    assert signal.getsignal(signal.SIGTERM) is up


def test_a_handler_of_asyncio_runs_once() -> None:
    called: list[int] = []

    async def program() -> None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, called.append, 1)
        with defer_interrupts():
            signal.raise_signal(signal.SIGTERM)
        await asyncio.sleep(0.1)

    asyncio.run(program())
    assert called == [1]


def test_nested_ones_let_through_at_the_end_of_the_outermost() -> None:
    def nested() -> None:
        with defer_interrupts():
            signal.raise_signal(signal.SIGUSR1)
        called.append(1)

    called: list[int] = []
    with pytest.raises(TimeIsUp), defer_interrupts():
        nested()
    assert called == [1]
    assert signal.getsignal(signal.SIGUSR1) is up


def test_a_child_that_another_thread_forks_has_its_handlers(interpreters: Interpreters) -> None:
    """In an interpreter of its own. In such a child Python frees the main thread's thread-local objects: process groups of gloo,
    which other tests leave behind, hang or crash then."""
    program = """
        import os, signal, threading
        from deepnvme._interrupts import defer_interrupts

        def handler(number, frame): ...

        def fork():
            child = os.fork()
            if child == 0:
                handler_is_there = signal.getsignal(signal.SIGUSR1) is handler
                with defer_interrupts():
                    deferred = signal.getsignal(signal.SIGUSR1) is not handler
                os._exit(0 if handler_is_there and deferred else 1)
            statuses.append(os.waitpid(child, 0)[1])

        statuses = []
        signal.signal(signal.SIGUSR1, handler)
        with defer_interrupts():
            thread = threading.Thread(target=fork)
            thread.start()
            thread.join()
        print(statuses)
    """
    assert interpreters.run(program).check() == "[0]\n"


def test_other_threads_hold_nothing_back() -> None:
    def in_a_thread() -> None:
        with defer_interrupts():
            assert signal.getsignal(signal.SIGTERM) is up

    thread = threading.Thread(target=in_a_thread)
    thread.start()
    thread.join()
