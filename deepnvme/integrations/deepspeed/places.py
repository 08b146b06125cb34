"""Where DeepSpeed looks for what is replaced: checked first, set together, put back."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

_ABSENT: Any = object()


class UnknownShape(RuntimeError):
    """DeepSpeed does not have a thing where it is looked for, or has another kind of thing there."""


def module(name: str) -> Any:
    """A module of DeepSpeed's. Raises UnknownShape if there is none of that name."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not name.startswith(error.name):
            raise
        raise UnknownShape(f"there is no {name}") from error


def attribute(owner: Any, name: str, parameters: Iterable[str] | None = None) -> Any:
    """A function or a class that DeepSpeed has there, with these parameters if given. Raises UnknownShape if there is no such."""
    path = f"{owner.__module__}.{owner.__qualname__}.{name}" if isinstance(owner, type) else f"{owner.__name__}.{name}"
    found = getattr(owner, name, None)
    if not callable(found):
        raise UnknownShape(f"there is no {path}")
    taken = [parameter for parameter in inspect.signature(found).parameters if parameter != "self"]
    if parameters is not None and taken != list(parameters):
        raise UnknownShape(f"{path} takes ({', '.join(taken)}) rather than ({', '.join(parameters)})")
    return found


@dataclass
class Replacement:
    """A name of a module or class, and what it is to be."""

    owner: Any
    name: str
    ours: Any
    _before: Any = field(default=_ABSENT, init=False)

    def set(self) -> None:
        self._before = vars(self.owner).get(self.name, _ABSENT)
        setattr(self.owner, self.name, self.ours)

    def undo(self) -> None:
        """Nothing where somebody else has put something of his there since."""
        if vars(self.owner).get(self.name) is not self.ours:
            return
        if self._before is _ABSENT:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self._before)


def set_all(replacements: Iterable[Replacement]) -> list[Replacement]:
    """Set all of them or, after an error, none. Returns them in the order in which they were set."""
    done: list[Replacement] = []
    try:
        for replacement in replacements:
            replacement.set()
            done.append(replacement)
    except BaseException:
        undo_all(done)
        raise
    return done


def undo_all(replacements: list[Replacement]) -> None:
    """Put back what was there, the last first; the list is empty then."""
    while replacements:
        replacements.pop().undo()
