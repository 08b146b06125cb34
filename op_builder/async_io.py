"""The async_io op: what it is compiled from, and which backends it can be given."""

from __future__ import annotations

import importlib.util
import sysconfig
from pathlib import Path
from typing import NamedTuple

from . import kernel, packages, toolchain
from .builder import _PACKAGE_ROOT, OpBuilder
from .toolchain import Attempt

# Each backend's class, whose name is in the type information of the op whether or not it was stripped.
_MARKERS = {"io_uring": b"UringBackend", "libaio": b"LibaioBackend"}


class Backend(NamedTuple):
    """A backend that needs a library at build time and the kernel's consent at run time."""

    name: str
    library: Attempt
    kernel: Attempt


class AsyncIOBuilder(OpBuilder):
    """Builds the async_io op: ``aio_handle``, the engine, and what the package has compiled besides."""

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
        """Compiler flags, one argument each; they define a macro for each of liburing and libaio that is there."""
        args = ["-std=c++20", "-O2", "-g0", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-pthread"]
        # What is dequantised is the same bit for bit wherever there are fused operations.
        args.append("-ffp-contract=off")
        if liburing():
            args.append("-DDEEPNVME_HAVE_LIBURING=1")
        if libaio():
            args.append("-DDEEPNVME_HAVE_LIBAIO=1")
        return args

    def extra_ldflags(self) -> list[str]:
        """Linker flags, with liburing and libaio as far as they are there."""
        flags = ["-pthread", "-ldl"]  # which glibc has in itself since 2.34
        if liburing():
            flags.append("-luring")
        if libaio():
            flags.append("-laio")
        return flags

    def backends(self) -> list[Backend]:
        """The backends that a build made here may lack, fastest first. The thread pool is in every build. Never raises."""
        return [
            Backend("io_uring", liburing(), kernel.io_uring()),
            Backend("libaio", libaio(), kernel.linux_aio()),
        ]

    def compiled_in(self, library: Path) -> set[str]:
        """Names of those backends that the compiled op ``library`` has. Reads it, without importing it; raises OSError."""
        content = library.read_bytes()
        return {name for name, marker in _MARKERS.items() if marker in content}

    def is_compatible(self, verbose: bool = False) -> bool:
        """True wherever C++20 compiles, because the thread pool needs nothing else. ``verbose`` prints which of libaio
        and liburing is missing, how to install it, and the backend that is used instead."""
        if not super().is_compatible(verbose):
            return False
        if verbose:
            self._explain_missing_libraries()
        return True

    def _explain_missing_libraries(self) -> None:
        """Print which of libaio and liburing is missing, and the backend that is used instead."""
        uring, aio = self.backends()
        if not aio.library:
            self.warning(f"{self.NAME} requires the dev libaio .so object and headers but these were not found.")
            self._explain_package("libaio")
            self.warning(
                "If libaio is already installed (perhaps from source), try setting the CFLAGS and LDFLAGS environment "
                "variables to where it can be found."
            )
        if not uring.library:
            self.warning(f"{self.NAME} can use io_uring, but liburing's .so object and headers were not found.")
            self._explain_package("liburing")
        if not (aio.library and uring.library):
            usable = [backend.name for backend in (uring, aio) if backend.library and backend.kernel]
            print(f"{self.NAME}: {usable[0] if usable else 'the thread pool'} is used instead.")

    def _explain_package(self, package: str) -> None:
        """Print which of the distribution's packages to install, unless it is installed."""
        manager = packages.manager()
        if manager is not None and not manager.has(package):
            self.warning(f"{self.NAME}: please install the {manager.names[package]} package with {manager.tool}")


def liburing() -> Attempt:
    """Whether the io_uring backend can be compiled. Never raises."""
    return _library("uring", "liburing.h", "io_uring_queue_init(2, nullptr, 0)")


def libaio() -> Attempt:
    """Whether the libaio backend can be compiled. Never raises."""
    return _library("aio", "libaio.h", "io_submit(nullptr, 0, nullptr)")


def _library(name: str, header: str, expression: str) -> Attempt:
    """Return whether there is a C++ compiler, and a program that evaluates the expression compiles and links with the library."""
    found = toolchain.find()
    return found if isinstance(found, Attempt) else found.has_library(name, header, expression)


def _pybind11_include() -> list[str]:
    """Return pybind11's include directory; empty if it is not installed."""
    spec = importlib.util.find_spec("pybind11")
    return [str(Path(spec.origin).parent / "include")] if spec is not None and spec.origin is not None else []
