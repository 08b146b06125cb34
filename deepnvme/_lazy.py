"""Public names of a package whose modules are imported when one asks for them."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Mapping
from typing import Any


def from_modules(package: str, modules: Mapping[str, str], packages: Collection[str] = ()) -> Callable[[str], Any]:
    """A package's ``__getattr__`` for names, each with its module there (or a whole name), and for ``packages`` in it."""

    def get(name: str) -> Any:
        if name in packages:
            return importlib.import_module(f".{name}", package)
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = modules[name] if modules[name].startswith("deepnvme.") else f"{package}.{modules[name]}"
        return getattr(importlib.import_module(module), name)

    return get
