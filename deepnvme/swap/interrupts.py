"""Ctrl-C, and what handlers of other signals raise, where half a change would be worse than a moment's wait."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

_NUMBERS: tuple[int, ...] = (
    signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGALRM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU,
)  # fmt: skip
"""Those that people, timers and schedulers send, and programs have handlers for. To look at all 64 takes 0.1 ms."""


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """Signals of ``_NUMBERS`` that have a handler in Python come at the end, each once: it may raise an exception, as that of
    Ctrl-C does. Has no effect outside the main thread, which alone runs handlers."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    replaced: dict[int, Callable[..., Any]] = {}
    try:
        for number in _NUMBERS:
            handler = signal.getsignal(number)
            if callable(handler):
                replaced[number] = handler
                signal.signal(number, lambda which, frame: came.append(which))
        yield
    finally:
        try:
            _restore(replaced)
        finally:
            with contextlib.ExitStack() as late:  # all of them, whatever one raises
                for number in dict.fromkeys(came):
                    late.callback(signal.raise_signal, number)


def _restore(replaced: dict[int, Callable[..., Any]]) -> None:
    """All handlers, also where one that is in its place again raises meanwhile."""
    raised: BaseException | None = None
    while replaced:
        try:
            for number in list(replaced):
                signal.signal(number, replaced[number])
                del replaced[number]
        except BaseException as error:
            raised = error
    if raised is not None:
        raise raised
