"""The gds op: transfers between GPU memory and the drive by cuFile, which it opens at run time and is not compiled against."""

from __future__ import annotations

import contextlib
import ctypes
from types import ModuleType

from . import cuda
from .async_io import AsyncIOBuilder

_CUFILE = "libcufile.so.0"
_BOUND_BY_ASYNC_IO = ("checkpoint", "engine", "kvstore", "memory", "quantization", "tables")
"""Parts of async_io, a file of bindings each, that this op lacks."""


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
        """Return the reasons why the op would not work here (torch without CUDA, no cuFile), with remedies. Never raises."""
        return self.probe().lacking()

    def probe(self) -> cuda.GdsProbe:
        """Return the CUDA toolkit, cuFile and their versions on this machine. Never raises."""
        return cuda.probe()

    def load(self, verbose: bool = False) -> ModuleType:
        """Load the op as :meth:`OpBuilder.load` does, and share async_io's pinned memory with it.

        Also raises RuntimeError if :meth:`lacking` has a reason.
        """
        self._require()
        return self._connected(super().load(verbose))

    def jit_load(self, verbose: bool = True) -> ModuleType:
        """Load the op as :meth:`OpBuilder.jit_load` does. Otherwise like :meth:`load`."""
        self._require()
        return self._connected(super().jit_load(verbose))

    def _require(self) -> None:
        """Raise RuntimeError if the op would not work on this machine."""
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
