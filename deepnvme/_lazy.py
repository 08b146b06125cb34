"""Public names of a package that are imported on first use.

Type checkers must not see a module's ``__getattr__``, since they would take any misspelt name for one of its attributes. So a
package whose names are imported on first use defines it below ``if not TYPE_CHECKING:``, and imports the names for type checkers
below ``if TYPE_CHECKING:``.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any


def from_modules(
    package: str, modules: Mapping[str, str], packages: Collection[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` for a package: one imports names on first use, the other lists all names.

    Args:
        package: Name of the package. Its ``__all__`` has the public names.
        modules: For each public name, the module that defines it: relative to the package, or a full name beginning with
            "deepnvme.".
        packages: Submodules to import on first use, as attributes of the package. A submodule that cannot be imported raises
            AttributeError then.
    """

    def get(name: str) -> Any:
        """Import the public name or submodule. Raises AttributeError for an unknown name, or if its project is not installed."""
        if name in packages:
            try:
                return importlib.import_module(f".{name}", package)
            except ImportError as error:
                # hasattr, help and tab completion expect it. ``from package import name`` imports again: ImportError.
                raise AttributeError(f"{package}.{name} cannot be imported: {error}") from error
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = modules[name] if modules[name].startswith("deepnvme.") else f"{package}.{modules[name]}"
        return getattr(importlib.import_module(module), name)

    def names() -> list[str]:
        """Return the public names, sorted."""
        return sorted({*sys.modules[package].__all__, *packages})

    return get, names
