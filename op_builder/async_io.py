"""The async_io op: what it is compiled from, and which backends it can be given."""

from __future__ import annotations

import importlib.util
import sysconfig
from pathlib import Path
from typing import NamedTuple

from . import kernel
from .builder import _PACKAGE_ROOT, OpBuilder, stable_abi
from .toolchain import Attempt


class Backend(NamedTuple):
    """A backend that needs the kernel's consent at run time."""

    name: str
    kernel: Attempt


class AsyncIOBuilder(OpBuilder):
    """Builds the async_io op: ``aio_handle``, the engine, and the package's other compiled functions."""

    BUILD_VAR = "DS_BUILD_AIO"
    NAME = "async_io"

    def absolute_name(self) -> str:
        """Full dotted name of the op's module, below ``deepnvme.ops.aio``."""
        return f"deepnvme.ops.aio.{self.NAME}_op"

    def sources(self) -> list[str]:
        """Files to compile, relative to the directory that holds ``csrc``: all of ``csrc`` but the gds op's own."""
        return self._sources("core", "engine", "checkpoint", "kvstore", "quantization", "tables", "bindings", without={"gds.cpp"})

    @staticmethod
    def _sources(*parts: str, without: set[str]) -> list[str]:
        """Return the sources in directories of ``csrc``, relative to the package, without files of the given names."""
        files = (path for part in parts for path in (_PACKAGE_ROOT / "csrc" / part).glob("*.cpp") if path.name not in without)
        return sorted(path.relative_to(_PACKAGE_ROOT).as_posix() for path in files)

    def include_paths(self) -> list[str]:
        """Directories to search for headers: ``csrc``, nanobind's if it is installed, and Python's."""
        nanobind = _nanobind()
        foreign = [nanobind / "include", nanobind / "ext" / "robin_map" / "include"] if nanobind else []
        return ["csrc", *map(str, foreign), sysconfig.get_path("include")]

    def runtime_sources(self) -> list[Path]:
        """What nanobind's bindings call, in one file; empty if it is not installed."""
        nanobind = _nanobind()
        return [nanobind / "src" / "nb_combined.cpp"] if nanobind else []

    def cxx_args(self) -> list[str]:
        """Compiler flags, one argument each."""
        args = ["-std=c++20", "-O2", "-g0", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-pthread"]
        # What is dequantised is the same bit for bit wherever there are fused operations.
        args += ["-ffp-contract=off"]
        # As nanobind's runtime has to be compiled. Each op has classes of its own, though their C++ names are the same.
        args += ["-fno-strict-aliasing", "-DNDEBUG", "-DNB_COMPACT_ASSERTIONS", f"-DNB_DOMAIN={self.NAME}"]
        # nanobind 3.1 leaves <cstdio> to Python.h, which does not include it for the stable ABI.
        return [*args, "-DPy_LIMITED_API=0x030C0000", "-include", "cstdio"] if stable_abi() else args

    def extra_ldflags(self) -> list[str]:
        """Linker flags. libaio is not linked, unlike in DeepSpeed's op: this op makes its five system calls itself."""
        return ["-pthread", "-ldl"]  # which glibc has in itself since 2.34

    def backends(self) -> list[Backend]:
        """The backends that the kernel may refuse, fastest first. The thread pool works everywhere. Never raises."""
        return [Backend("io_uring", kernel.io_uring()), Backend("libaio", kernel.linux_aio())]


def _nanobind() -> Path | None:
    """Return nanobind's directory; None if it is not installed."""
    spec = importlib.util.find_spec("nanobind")
    return Path(spec.origin).parent if spec is not None and spec.origin is not None else None
