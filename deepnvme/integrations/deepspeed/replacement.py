"""Replace names in DeepSpeed's modules and classes: check that they exist, set all or none, and restore them."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

_ABSENT: Any = object()


class UnexpectedDeepSpeed(RuntimeError):
    """Raised if a part of DeepSpeed is missing where it is expected, or is of another kind or signature."""


def module(name: str) -> Any:
    """Import and return a module of DeepSpeed. Raises UnexpectedDeepSpeed if there is no module of this name."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not name.startswith(error.name):
            raise
        raise UnexpectedDeepSpeed(f"there is no {name}") from error


def attribute(owner: Any, name: str, parameters: Iterable[str] | None = None) -> Any:
    """Return a function or class that belongs to a module or class of DeepSpeed.

    Args:
        owner: The module or class.
        name: Name of the attribute.
        parameters: Names that the parameters must have, in order, without ``self``. None to accept any.

    Raises:
        UnexpectedDeepSpeed: If the attribute is missing, cannot be called, or has other parameters.
    """
    path = f"{owner.__module__}.{owner.__qualname__}.{name}" if isinstance(owner, type) else f"{owner.__name__}.{name}"
    found = getattr(owner, name, None)
    if not callable(found):
        raise UnexpectedDeepSpeed(f"there is no {path}")
    taken = [parameter for parameter in inspect.signature(found).parameters if parameter != "self"]
    if parameters is not None and taken != list(parameters):
        raise UnexpectedDeepSpeed(f"{path} takes ({', '.join(taken)}) rather than ({', '.join(parameters)})")
    return found


class Replacement(NamedTuple):
    """A name in a module or class of DeepSpeed, and the value that replaces its value."""

    owner: Any
    name: str
    ours: Any

    def set(self) -> Callable[[], None]:
        """Replace the value, and return a function that restores the old one unless other code has replaced the value since."""
        before = vars(self.owner).get(self.name, _ABSENT)
        setattr(self.owner, self.name, self.ours)

        def undo() -> None:
            if vars(self.owner).get(self.name) is not self.ours:
                return
            if before is _ABSENT:
                delattr(self.owner, self.name)
            else:
                setattr(self.owner, self.name, before)

        return undo


def around(owner: Any, name: str, function: Callable[..., Any], parameters: Iterable[str] | None = None) -> Replacement:
    """Return the replacement of a function or method of DeepSpeed by a wrapper around it.

    Args:
        owner: The module or class.
        name: Name of the function or method.
        function: The wrapper. Called with DeepSpeed's own function before the other arguments.
        parameters: As for :func:`attribute`, which raises UnexpectedDeepSpeed.
    """
    original = attribute(owner, name, parameters)

    @functools.wraps(original)
    def replaced(*arguments: Any, **named: Any) -> Any:
        return function(original, *arguments, **named)

    return Replacement(owner, name, replaced)


def set_all(replacements: Iterable[Replacement]) -> contextlib.ExitStack:
    """Set all replacements or, after an exception, none. Closing the returned stack restores the old values, last one first."""
    with contextlib.ExitStack() as undoing:
        for replacement in replacements:
            undoing.callback(replacement.set())
        return undoing.pop_all()
