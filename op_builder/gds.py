"""The gds op: transfers between GPU memory and the drive by cuFile, which it opens at run time and is not compiled against."""

from __future__ import annotations

import contextlib
import ctypes
from types import ModuleType

from . import cuda
from .async_io import AsyncIOBuilder

_CUFILE = "libcufile.so.0"
_BOUND_BY_ASYNC_IO = ("checkpoint", "engine", "memory", "quantization", "tables")
"""What this op has not: each a file of bindings."""


class GDSBuilder(AsyncIOBuilder):
    """Builds the gds op: ``gds_handle``, for tensors in GPU memory."""

    BUILD_VAR = "DS_BUILD_GDS"
    NAME = "gds"

    def absolute_name(self) -> str:
        """Full dotted name of the op's module, below ``deepnvme.ops.gds``."""
        return f"deepnvme.ops.gds.{self.NAME}_op"

    def sources(self) -> list[str]:
        """Files to compile, relative to the directory that holds ``csrc``: the engine, cuFile and the bindings of both."""
        async_io_only = {f"{part}_binding.cpp" for part in _BOUND_BY_ASYNC_IO} | {"async_io.cpp"}
        return self._sources("core", "engine", "gds", "bindings", without=async_io_only)

    def lacking(self) -> list[str]:
        """Why the op would be of no use here (torch without CUDA, no cuFile), each with what to do about it. Never raises."""
        return self.probe().lacking()

    def probe(self) -> cuda.GdsProbe:
        """The CUDA toolkit, cuFile and their versions, as found here. Never raises."""
        return cuda.probe()

    def load(self, verbose: bool = False) -> ModuleType:
        """As :meth:`OpBuilder.load`, sharing async_io's pinned memory. Raises RuntimeError also for what :meth:`lacking` has."""
        self._require()
        return self._connected(super().load(verbose))

    def jit_load(self, verbose: bool = True) -> ModuleType:
        """As :meth:`OpBuilder.jit_load`; for the rest as :meth:`load`."""
        self._require()
        return self._connected(super().jit_load(verbose))

    def _require(self) -> None:
        """Raise RuntimeError if the op would be of no use here."""
        # Also where the op was compiled: it could do nothing, and would say so only later.
        lacking = self.lacking()
        if lacking:
            self.error_log = "; ".join(lacking)
            raise RuntimeError(f"{self.name} cannot be used: {self.error_log}")

    def _connected(self, module: ModuleType) -> ModuleType:
        """Give a module of the op the pinned memory of async_io, and open cuFile for it."""
        # One record of pinned memory for both ops, as DeepSpeed's callers expect.
        module.adopt_pinned_ranges(AsyncIOBuilder().load().shared_pinned_ranges())
        self._open_cufile()
        return module

    def _open_cufile(self) -> None:
        """Load cuFile by its name or, as it is in a wheel, by its path: the op then finds it by its name.

        Never raises: the op itself says why it cannot be loaded.
        """
        for name in (_CUFILE, self.probe().cufile_library.path):
            with contextlib.suppress(OSError):
                ctypes.CDLL(name)
                return
