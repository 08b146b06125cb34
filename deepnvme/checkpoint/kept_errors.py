"""Errors that somebody keeps, a notebook say: their tracebacks keep no leased memory."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
_PACKAGE = __name__.partition(".")[0]


def clear_frames(error: BaseException) -> None:
    """Forget the local variables of this package's functions that the error has left, and the errors that led to it.

    Frames of others stay as they are: a debugger may want them, and clearing one of a suspended generator would close that.
    """
    waiting: list[BaseException | None] = [error]
    seen: set[int] = set()
    while waiting:
        each = waiting.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        waiting += each.__cause__, each.__context__
        trace = each.__traceback__
        while trace is not None:
            if str(trace.tb_frame.f_globals.get("__name__")).partition(".")[0] == _PACKAGE:
                with contextlib.suppress(RuntimeError):  # still running
                    trace.tb_frame.clear()
            trace = trace.tb_next


def clearing_frames(function: Callable[P, R]) -> Callable[P, R]:
    """Return a function like this one whose errors keep its arguments, and no other variables of this package's functions."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            clear_frames(error)
            raise

    return call
