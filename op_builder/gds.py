"""The gds op: transfers between GPU memory and the drive. Its sources come with a later version; its probes work now."""

from __future__ import annotations

from types import ModuleType

from . import cuda
from .async_io import AsyncIOBuilder

_NOT_YET = "is not part of this version yet: use async_io through a pinned CPU tensor"


class GDSBuilder(AsyncIOBuilder):
    BUILD_VAR = "DS_BUILD_GDS"
    NAME = "gds"

    def absolute_name(self) -> str:
        return f"deepnvme.ops.gds.{self.NAME}_op"

    def sources(self) -> list[str]:
        return []

    def obstacles(self) -> list[str]:
        return [_NOT_YET]  # decisive; what else would be in the way is in probe()

    def probe(self) -> cuda.GdsProbe:
        """The CUDA toolkit, cuFile and their versions, as found here. Never raises."""
        return cuda.probe()

    def load(self, verbose: bool = False) -> ModuleType:
        """Raises RuntimeError in this version."""
        return self.jit_load(verbose)
