"""The utils op: tensors seen as bytes and flattened, in Python alone, so that there is nothing to compile."""

from __future__ import annotations

import importlib
from types import ModuleType

from .builder import OpBuilder


class UtilsBuilder(OpBuilder):
    """Loads the utils op, which works everywhere."""

    BUILD_VAR = "DS_BUILD_UTILS"
    NAME = "utils"

    def absolute_name(self) -> str:
        """Full dotted name of the op's module, which is Python."""
        return f"deepnvme.ops.{self.NAME}_op"

    def sources(self) -> list[str]:
        """Files to compile: none."""
        return []

    def obstacles(self) -> list[str]:
        """Return no obstacles, since nothing is compiled."""
        return []

    def load(self, verbose: bool = False) -> ModuleType:
        """Import the op's module. ``verbose`` is ignored."""
        return importlib.import_module(self.absolute_name())

    def jit_load(self, verbose: bool = True) -> ModuleType:
        """Import the op's module, like :meth:`load`: there is nothing to compile."""
        return self.load(verbose)
