"""Ctrl-C, and what handlers of other signals raise, where half a change would be worse than a moment's wait."""

from __future__ import annotations

import contextlib
import ctypes
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

_SIGNALS: tuple[int, ...] = (
    signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF,
    signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU,
)  # fmt: skip
"""Signals that programs commonly handle. Looking at all 64 takes 0.1 ms a call."""

_sigaction = ctypes.PyDLL(None).sigaction
_SIGACTION_BYTES = 256  # struct sigaction has 152


@contextlib.contextmanager
def defer_interrupts() -> Iterator[None]:
    """Delay the Python handlers of these signals to the end of the block; each is called once, however often its signal came.

    So an exception that a handler raises (KeyboardInterrupt, a timeout) cannot end the block halfway. No effect outside the main
    thread: Python runs no handlers there. They wait as long as the block does: also for a drive that hangs, or for other ranks.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held = _DeferredInterrupts()
    try:
        for number in _SIGNALS:
            held.hold(number)
        yield
    finally:
        try:
            held.end()
        finally:  # it may not have begun: a signal that is not held back yet
            held._holding = False


class _DeferredInterrupts:
    """Stands in for handlers, as :meth:`_take`.

    Once it holds nothing back an exception can come anywhere. If one ends :meth:`end`, handlers that are not put back yet are
    still called, by ``_take``, and the next one of these puts them back.
    """

    def __init__(self) -> None:
        self._holding = True
        self._came: list[int] = []
        self._handlers: dict[int, Callable[..., Any]] = {}
        self._replaced: list[int] = []

    def hold(self, number: int) -> None:
        handler = signal.getsignal(number)
        before = getattr(handler, "__self__", None)
        if isinstance(before, _DeferredInterrupts) and not before._holding:
            handler = before._handlers[number]
        if callable(handler):
            self._handlers[number] = handler
            self._replaced.append(number)
            _set(number, self._take)

    def _take(self, number: int, frame: FrameType | None) -> None:
        if not self._holding:
            self._handlers[number](number, frame)
        elif number not in self._came:
            self._came.append(number)

    def end(self) -> None:
        """Call the handlers, all of them, whatever one raises, and put them back."""
        try:
            while self._came:
                self._let_through(self._came.pop(0), sys._getframe())
            self._holding = False
            while self._replaced:
                number = self._replaced[-1]
                _set(number, self._handlers[number])
                self._replaced.pop()
        finally:
            if self._came or self._replaced:
                self.end()

    def _let_through(self, number: int, frame: FrameType) -> None:
        """Call the handler itself: raising the signal again would run asyncio's callbacks twice."""
        try:
            self._holding = False
            self._handlers[number](number, frame)
        finally:
            self._holding = True


def _set(number: int, handler: Callable[..., Any]) -> None:
    """signal.signal, but keeps what is set in C: ``siginterrupt``, and a handler that runs first, as faulthandler's."""
    action = ctypes.create_string_buffer(_SIGACTION_BYTES)
    _sigaction(number, None, action)
    try:
        signal.signal(number, handler)
    finally:
        _sigaction(number, action, None)
