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
        return f"deepnvme.ops.{self.NAME}_op"

    def sources(self) -> list[str]:
        return []

    def obstacles(self) -> list[str]:
        return []

    def load(self, verbose: bool = False) -> ModuleType:
        return importlib.import_module(self.absolute_name())

    def jit_load(self, verbose: bool = True) -> ModuleType:
        return self.load(verbose)
