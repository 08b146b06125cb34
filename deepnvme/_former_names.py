"""Arguments that had another name in earlier versions of this package."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


def former_names(**names: str) -> Callable[[Function], Function]:
    """Decorator of a function that also takes some keyword arguments by their former names.

    >>> @former_names(config="aio_config")
    ... def save(state, path, *, aio_config=None): ...

    Args:
        **names: For each former name, the present one. If a call gives both, the function raises TypeError.
    """

    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        def accepting(*args: Any, **kwargs: Any) -> Any:
            for former, present in names.items():
                if former in kwargs:
                    if present in kwargs:
                        raise TypeError(f"{former} is the former name of {present}: give only {present}")
                    kwargs[present] = kwargs.pop(former)
            return function(*args, **kwargs)

        return accepting  # type: ignore[return-value]

    return decorate
