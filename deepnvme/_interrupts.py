"""Deferring Ctrl-C, and the Python handlers of other signals, while a change must not stop halfway; waiting in spite of it."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # signal without its conversions to enums, which take 25 times as long
import contextlib
import ctypes
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

_SIGNALS: tuple[int, ...] = (
    signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF,
    signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU,
)  # fmt: skip
"""Signals that programs commonly handle. Checking all 64 takes 0.1 ms for each call."""

_sigaction = ctypes.PyDLL(None).sigaction
_Sigaction = ctypes.c_char * 256  # at least the size of struct sigaction, 152


@contextlib.contextmanager
def defer_interrupts() -> Iterator[None]:
    """Delay Python signal handlers until the end of the block. Each is then called once, however often its signal came.

    An exception that a handler raises (KeyboardInterrupt, a timeout) therefore cannot stop the block halfway. The handlers wait
    as long as the block runs, even if a drive hangs or the block waits for other ranks. Only the signals in ``_SIGNALS`` are
    delayed. No effect outside the main thread, since Python runs no handlers there.
    """
    global _deferring
    if (_deferring is not None and _deferring._holding) or threading.get_ident() != threading.main_thread().ident:
        yield
        return
    held = _DeferredInterrupts()
    try:
        for number in _SIGNALS:
            handler = _signal.getsignal(number)
            if callable(handler):  # checked here, since most signals have no handler in Python, and a call takes longer
                held.hold(number, handler)
        _deferring = held
        yield
    finally:
        try:
            held.end()
        finally:  # end() may not have begun, if a signal that is not delayed interrupted this
            held._holding = False
            _deferring = None


_deferring: _DeferredInterrupts | None = None
"""The outermost block of the main thread, while it delays handlers: blocks inside of it need not."""


class _DeferredInterrupts:
    """Replaces signal handlers by :meth:`_take`, which delays their calls until :meth:`end`.

    Once it delays nothing any more, an exception can come at any point. If one interrupts :meth:`end`, the handlers that are not
    yet restored are still called, by ``_take``, and the next ``_DeferredInterrupts`` restores them.
    """

    def __init__(self) -> None:
        self._holding = True
        self._thread = threading.get_ident()
        self._came: list[int] = []
        self._handlers: dict[int, Callable[..., Any]] = {}
        self._replaced: list[int] = []

    def hold(self, number: int, handler: Callable[..., Any]) -> None:
        """Delay a signal's Python handler, unless a block around this one delays it already."""
        before = getattr(handler, "__self__", None)
        if isinstance(before, _DeferredInterrupts):
            if before._holding:
                return
            handler = before._handlers[number]
        self._handlers[number] = handler
        self._replaced.append(number)
        _set(number, self._take)

    def _take(self, number: int, frame: FrameType | None) -> None:
        """Note a signal, or call its handler if signals are no longer delayed."""
        if not self._holding:
            self._handlers[number](number, frame)
        elif number not in self._came:
            self._came.append(number)

    def end(self) -> None:
        """Call the handlers of the signals that came, all of them even if one raises, and restore the handlers."""
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
        """Call a handler directly: raising the signal again would run asyncio's callbacks twice."""
        try:
            self._holding = False
            self._handlers[number](number, frame)
        finally:
            self._holding = True


def _restore_handlers() -> None:
    """Restore the handlers in a child that another thread has forked: the thread that would is not there."""
    global _deferring
    if _deferring is not None and _deferring._thread != threading.get_ident():
        _deferring._came.clear()
        _deferring.end()
        _deferring = None


os.register_at_fork(after_in_child=_restore_handlers)


def _set(number: int, handler: Callable[..., Any]) -> None:
    """Call signal.signal, but keep what was set in C: ``siginterrupt``, and C handlers that run first, like faulthandler's."""
    action = _Sigaction()
    _sigaction(number, None, action)
    try:
        _signal.signal(number, handler)
    finally:
        _sigaction(number, action, None)


class Latch:
    """Like ``threading.Event``, but it can only be set once, and it is safe from Ctrl-C.

    A wait that is interrupted at any point leaves no lock taken that other threads need. Thread-safe.
    """

    def __init__(self) -> None:
        self._is_set = False
        self._waiting: deque[threading.Lock] = deque()
        """One lock for each waiting thread, which acquires it twice: the second acquire returns when :meth:`set` releases it."""

    def is_set(self) -> bool:
        """Return whether :meth:`set` was called. Never blocks."""
        return self._is_set

    def set(self) -> None:
        """Wake all waiting threads. Idempotent: if a call was interrupted, the next one wakes the remaining threads."""
        self._is_set = True
        while True:
            try:
                waiting = self._waiting.popleft()
            except IndexError:
                return
            waiting.release()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the latch is set.

        Args:
            timeout: Seconds. None waits without a limit.

        Returns:
            Whether the latch is set. False only after a timeout.
        """
        if not self._is_set:
            mine = threading.Lock()
            mine.acquire()
            self._waiting.append(mine)
            if not self._is_set:  # it may have been set, and the waiting threads woken, before this lock was in the list
                mine.acquire(timeout=-1 if timeout is None else max(timeout, 0.0))
            if not self._is_set:  # timed out: polling would otherwise leave a lock in the list each time
                with contextlib.suppress(ValueError):
                    self._waiting.remove(mine)
        return self._is_set
