"""Deferring Ctrl-C, and the Python handlers of other signals, while a change must not stop halfway."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # signal without its conversions to enums, which take 25 times as long
import contextlib
import os
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
"""Signals that programs commonly handle. Checking all 64 takes 0.1 ms for each call."""


@contextlib.contextmanager
def defer_interrupts() -> Iterator[list[int]]:
    """Delay Python signal handlers until the end of the ``with`` body.

    Each handler is then called once, however often its signal came. An exception that a handler raises (KeyboardInterrupt, a
    timeout) therefore cannot stop the body halfway. So the body must not wait for a drive, for memory or for other ranks.
    Only the signals in ``_SIGNALS`` are delayed. Settings of ``signal.siginterrupt`` and ``faulthandler.register`` for a
    signal with a Python handler are lost, as ``signal.signal`` loses them. Outside the main thread, where Python runs no
    handlers, and inside another such ``with`` body, this has no effect.

    Yields:
        The signals that came so far; always empty where ``defer_interrupts`` has no effect. A body that waits nevertheless should
        stop waiting once there is one.
    """
    global _deferring
    if _deferring is not None or threading.get_ident() != threading.main_thread().ident:
        yield []
        return
    deferred = _DeferredInterrupts()
    try:
        _deferring = deferred
        for number in _SIGNALS:
            handler = _signal.getsignal(number)
            if callable(handler):  # checked here, since most signals have no handler in Python, and a call takes longer
                deferred.hold(number, handler)
        yield deferred.came
    finally:
        deferred.end()


_deferring: _DeferredInterrupts | None = None
"""The outermost active deferral of the main thread; None if there is none. Deferrals inside it need not delay handlers."""


class _DeferredInterrupts:
    """Replaces signal handlers by one that notes the signal, until :meth:`end` restores and calls them."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.came: list[int] = []
        self._handlers: dict[int, Callable[..., Any]] = {}

    def hold(self, number: int, handler: Callable[..., Any]) -> None:
        """Replace ``handler``, the signal's Python handler, by one that only notes the signal, until :meth:`end`."""
        self._handlers[number] = handler
        _signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number not in self.came:
            self.came.append(number)

    def end(self) -> None:
        """Restore the handlers, and call the handler of each signal that came, even if another handler raises."""
        global _deferring
        try:
            while self._handlers:
                number, handler = next(iter(self._handlers.items()))
                _signal.signal(number, handler)
                del self._handlers[number]
            _deferring = None
            while self.came:  # called directly: raising the signal again would run asyncio's callbacks twice
                number = self.came.pop(0)
                _signal.getsignal(number)(number, sys._getframe())
        finally:
            if self._handlers or self.came:  # a handler that is restored has raised
                self.end()


def _restore_handlers() -> None:
    """Restore the handlers in a forked child, if the fork interrupted a deferral in a thread that does not exist in the child."""
    if _deferring is not None and _deferring.thread != threading.get_ident():
        _deferring.came.clear()
        _deferring.end()


os.register_at_fork(after_in_child=_restore_handlers)
