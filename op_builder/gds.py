"""The gds op: transfers between GPU memory and the drive by cuFile, which it opens at run time and is not compiled against."""

from __future__ import annotations

from types import ModuleType

from . import cuda
from .async_io import AsyncIOBuilder


class GDSBuilder(AsyncIOBuilder):
    BUILD_VAR = "DS_BUILD_GDS"
    NAME = "gds"

    def absolute_name(self) -> str:
        return f"deepnvme.ops.gds.{self.NAME}_op"

    def sources(self) -> list[str]:
        return self._sources("core", "engine", "gds", "bindings", without="async_io.cpp")

    def obstacles(self) -> list[str]:
        """Also where it would compile, but could do nothing: without a torch that knows CUDA, or without cuFile."""
        found = super().obstacles()
        probe = self.probe()
        return found or [problem for problem in (probe.without_cuda(), probe.cufile_library.problem) if problem]

    def probe(self) -> cuda.GdsProbe:
        """The CUDA toolkit, cuFile and their versions, as found here. Never raises."""
        return cuda.probe()

    def load(self, verbose: bool = False) -> ModuleType:
        return self._sharing(super().load(verbose))

    def jit_load(self, verbose: bool = True) -> ModuleType:
        return self._sharing(super().jit_load(verbose))

    @staticmethod
    def _sharing(module: ModuleType) -> ModuleType:
        # One record of pinned memory for both ops, as DeepSpeed's callers expect.
        module.adopt_pinned_ranges(AsyncIOBuilder().load().shared_pinned_ranges())
        return module
