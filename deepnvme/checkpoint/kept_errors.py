"""Errors that somebody keeps, a notebook say: their tracebacks keep no leased memory."""

from __future__ import annotations

import functools
import sys
import traceback
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def clear_frames(error: BaseException, handled: BaseException | None = None) -> None:
    """Forget the local variables of all functions that the error has left, and those that led to it, back to the one ``handled``
    already when the first of them was called: that one is the caller's."""
    each: BaseException | None = error
    while each is not None and each is not handled:
        traceback.clear_frames(each.__traceback__)
        each = each.__context__


def clearing_frames(function: Callable[P, R]) -> Callable[P, R]:
    """A function like this one, whose errors keep none of its local variables, nor of those that it called."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        handled = sys.exc_info()[1]
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            clear_frames(error, handled)
            raise

    return call
