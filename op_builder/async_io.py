"""The async_io op: what it is compiled from, and which backends it can be given."""

from __future__ import annotations

import importlib.util
import sysconfig
from pathlib import Path
from typing import NamedTuple

from . import kernel
from .builder import _PACKAGE_ROOT, OpBuilder
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
        return self._sources("core", "engine", "checkpoint", "quantization", "tables", "bindings", without={"gds.cpp"})

    @staticmethod
    def _sources(*parts: str, without: set[str]) -> list[str]:
        """Return the sources in directories of ``csrc``, relative to the package, without files of the given names."""
        files = (path for part in parts for path in (_PACKAGE_ROOT / "csrc" / part).glob("*.cpp") if path.name not in without)
        return sorted(path.relative_to(_PACKAGE_ROOT).as_posix() for path in files)

    def include_paths(self) -> list[str]:
        """Directories to search for headers: ``csrc``, pybind11's if it is installed, and Python's."""
        return ["csrc", *_pybind11_include(), sysconfig.get_path("include")]

    def cxx_args(self) -> list[str]:
        """Compiler flags, one argument each."""
        args = ["-std=c++20", "-O2", "-g0", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-pthread"]
        # What is dequantised is the same bit for bit wherever there are fused operations.
        return [*args, "-ffp-contract=off"]

    def extra_ldflags(self) -> list[str]:
        """Linker flags. libaio is not linked, unlike in DeepSpeed's op: this op makes its five system calls itself."""
        return ["-pthread", "-ldl"]  # which glibc has in itself since 2.34

    def backends(self) -> list[Backend]:
        """The backends that the kernel may refuse, fastest first. The thread pool works everywhere. Never raises."""
        return [Backend("io_uring", kernel.io_uring()), Backend("libaio", kernel.linux_aio())]


def _pybind11_include() -> list[str]:
    """Return pybind11's include directory; empty if it is not installed."""
    spec = importlib.util.find_spec("pybind11")
    return [str(Path(spec.origin).parent / "include")] if spec is not None and spec.origin is not None else []
