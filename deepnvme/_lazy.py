"""Public names of a package whose modules are imported when one asks for them."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Mapping
from typing import Any


def from_modules(package: str, modules: Mapping[str, str], packages: Collection[str] = ()) -> Callable[[str], Any]:
    """A package's ``__getattr__`` for names, each with its module of the package, and for ``packages`` in it."""

    def get(name: str) -> Any:
        if name in packages:
            return importlib.import_module(f".{name}", package)
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f".{modules[name]}", package), name)

    return get
