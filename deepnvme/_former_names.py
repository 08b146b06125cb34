"""Names of keyword arguments: former names, those in an object for advanced options, and misspelt ones."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


def former_names(advanced: type[Any] | None = None, **names: str) -> Callable[[Function], Function]:
    """Decorator of a function that also takes some keyword arguments by their former names.

    >>> @former_names(config="aio_config")
    ... def save(state, path, *, aio_config=None): ...

    Args:
        advanced: Class of the function's ``advanced`` argument, a dataclass. Its fields are taken as keyword arguments
            too, and a keyword argument counts more than the field.
        **names: For each former name, the present one. If a call gives both, the function raises TypeError.
    """
    fields = () if advanced is None else tuple(field.name for field in dataclasses.fields(advanced))

    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        def accepting(*args: Any, **kwargs: Any) -> Any:
            for former, present in names.items():
                if former in kwargs:
                    if present in kwargs:
                        raise TypeError(f"{former} is the former name of {present}: give only {present}")
                    kwargs[present] = kwargs.pop(former)
            if advanced is not None:
                options: Any = kwargs.get("advanced") or advanced()
                if not isinstance(options, advanced):
                    raise TypeError(f"advanced must be {advanced.__name__}(...), got {options!r}")
                given = {name: kwargs.pop(name) for name in fields if name in kwargs}
                kwargs["advanced"] = dataclasses.replace(options, **given)
            return function(*args, **kwargs)

        accepting._other_names = {**names, **{name: name for name in fields}}  # type: ignore[attr-defined]
        return accepting  # type: ignore[return-value]

    return decorate


def option_names(function: Callable[..., Any]) -> dict[str, str]:
    """Return the names of a function's arguments, each with its present name. Former names are among them."""
    parameters = inspect.signature(function).parameters.values()
    present = [each.name for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
    return {**getattr(function, "_other_names", {}), **{name: name for name in present}}


def refuse_options(taker: str, unknown: Iterable[str], known: Mapping[str, str], because: str) -> None:
    """Raise TypeError if there are unknown options. The message suggests known options with similar names.

    Args:
        taker: Name of the class or function that was given the options.
        unknown: Names of options that it does not take.
        known: Names that could be meant, each with the name to suggest: see :func:`option_names`.
        because: Explains in the message why an option is not taken. Left out if all unknown names have similar known ones.
    """
    unknown = sorted(unknown)
    meant = [known[found[0]] for name in unknown if (found := difflib.get_close_matches(name, known, 1))]
    reason = "" if len(meant) == len(unknown) else f": {because}"
    question = f"; did you mean {' and '.join(map(repr, dict.fromkeys(meant)))}?" if meant else ""
    if unknown:
        raise TypeError(f"{taker} does not know {', '.join(unknown)}{reason}{question}")


def check_optimizer_options(constructor: Callable[..., Any], options: Mapping[str, Any], optimizer: type) -> None:
    """Raise TypeError for options that an optimizer class does not take.

    Args:
        constructor: The ``__init__`` that was given the options: a misspelt option may be one of its arguments.
        options: Keyword arguments for the optimizer class.
        optimizer: The optimizer class. If it takes any keyword argument, its options are not checked.
    """
    if not any(each.kind is each.VAR_KEYWORD for each in inspect.signature(optimizer).parameters.values()):
        taken, taker = option_names(optimizer), constructor.__qualname__.partition(".")[0]
        because = f"neither it nor {getattr(optimizer, '__name__', optimizer)} has such an option"
        refuse_options(taker, options.keys() - taken.keys(), {**taken, **option_names(constructor)}, because)
