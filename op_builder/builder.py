"""OpBuilder: what every op's builder can do. The names are DeepSpeed's (deepspeed/ops/op_builder/builder.py)."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import platform
import shutil
import sys
import sysconfig
import threading
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, ClassVar

from . import jit, packages, toolchain
from .toolchain import Attempt, Toolchain

if TYPE_CHECKING:
    from setuptools import Extension

YELLOW = "\033[93m"
END = "\033[0m"
WARNING = f"{YELLOW} [WARNING] {END}"

_PACKAGE_ROOT = Path(__file__).resolve().parent.parent  # holds csrc/, in a checkout as in an installed package


class OpBuilder(ABC):
    """Builds and loads one op. ``load`` is thread-safe, and gives every caller in the process the same module.

    A subclass says what to compile; relative paths start at the directory that holds ``csrc``. The extension's own name
    is the last part of ``absolute_name()`` and reaches C++ as ``DEEPNVME_EXTENSION_NAME``.
    """

    NAME: ClassVar[str]
    BUILD_VAR: ClassVar[str]
    """Environment variable that has ``pip install`` compile this op ahead of time (1) or leave it out (0)."""

    _loaded_ops: ClassVar[dict[str, ModuleType]] = {}
    _load_lock: ClassVar[threading.RLock] = threading.RLock()

    def __init__(self, name: str | None = None) -> None:
        self.name = name or self.NAME
        self.error_log: str | None = None

    @abstractmethod
    def absolute_name(self) -> str:
        """Full dotted name of the op's module."""

    @abstractmethod
    def sources(self) -> list[str]:
        """Files to compile; relative paths start at the directory that holds ``csrc``."""

    def runtime_sources(self) -> list[Path]:
        """Files of other packages to compile with :meth:`sources`. They do not count for :meth:`source_hash`: a compiled op does
        not need the packages any more."""
        return []

    def include_paths(self) -> list[str]:
        """Directories to search for headers; a relative one belongs to the package, and counts for :meth:`source_hash`."""
        return []

    def cxx_args(self) -> list[str]:
        """Compiler flags, one argument each, not quoted for a shell. The environment's flags follow them."""
        return []

    def extra_ldflags(self) -> list[str]:
        """Linker flags; the environment's LDFLAGS come before them."""
        return []

    def is_compatible(self, verbose: bool = False) -> bool:
        """Return whether the op can be compiled on this machine, and would work. Never raises.

        If not, ``error_log`` says why, and ``verbose`` prints it.
        """
        obstacles = [*self.obstacles(), *self.lacking()]
        self.error_log = "; ".join(obstacles) if obstacles else None
        if verbose:
            for obstacle in obstacles:
                print(f"{WARNING} {self.name} {obstacle}")
        return not obstacles

    def obstacles(self) -> list[str]:
        """Return the reasons why the op cannot be compiled on this machine, each with a remedy; none if it can. Never raises.

        A missing ninja is not a reason: only ``jit_load`` needs it, and reports it.
        """
        if sys.platform != "linux":
            return [f"needs Linux, this is {platform.system()}"]
        found = toolchain.find()
        if isinstance(found, Attempt):
            return [f"cannot be built: {toolchain.explained(found)}"]
        if not Path(sysconfig.get_path("include"), "Python.h").exists():
            return [f"cannot be built: Python.h is not in {sysconfig.get_path('include')} ({packages.remedy('python')})"]
        if importlib.util.find_spec("nanobind") is None:
            return ["cannot be built: nanobind is not installed (pip install nanobind)"]
        return []

    def lacking(self) -> list[str]:
        """Return the requirements that the compiled op would lack on this machine, each with a remedy. Never raises."""
        return []

    def source_hash(self) -> str:
        """Return a digest of the sources and of all headers in or below the package's include paths.

        It is the same for a checkout and for an installed copy.
        """
        root = _PACKAGE_ROOT
        paths = {self._path(source) for source in self.sources()}
        for place in self.include_paths():
            if not os.path.isabs(place):
                paths.update(path for kind in ("*.h", "*.hpp") for path in self._path(place).rglob(kind))
        digest = hashlib.sha256()
        for path in sorted(paths):
            name = path.relative_to(root).as_posix() if path.is_relative_to(root) else path.name
            content = path.read_bytes()
            digest.update(f"{name}\0{len(content)}\0".encode() + content)
        return digest.hexdigest()[:32]

    def builder(self) -> Extension:
        """Return a setuptools Extension that compiles the op ahead of time. Use it from the directory that holds ``csrc``.

        ``setup.py`` compiles it together with :meth:`runtime_sources`.
        """
        from setuptools import Extension

        found = self._toolchain()
        return Extension(
            name=self.absolute_name(),
            sources=self.sources(),
            include_dirs=self.include_paths(),
            # setuptools gives CFLAGS to C alone; DeepSpeed's users set it for C++
            extra_compile_args=[*self.cxx_args(), *self._naming_flags(), *found.compile_flags],
            extra_link_args=[*found.link_flags, *self.extra_ldflags()],
            language="c++",
            py_limited_api=any(argument.startswith("-DPy_LIMITED_API") for argument in self.cxx_args()),
        )

    def load(self, verbose: bool = False) -> ModuleType:
        """Return the op's module: the one compiled ahead of time, if it was made from the sources installed now.

        Else return the module from the cache, or compile it, which blocks for seconds. Raises RuntimeError, saying what to do, if
        neither is possible.
        """
        name = self.absolute_name()
        loaded = OpBuilder._loaded_ops.get(name)
        if loaded is not None:  # which costs no lock, and so waits for nobody
            return loaded
        with OpBuilder._load_lock:
            loaded = OpBuilder._loaded_ops.get(name)
            if loaded is None:
                loaded = self._load_prebuilt() or self.jit_load(verbose)
                OpBuilder._loaded_ops[name] = loaded
            return loaded

    def jit_load(self, verbose: bool = True) -> ModuleType:
        """Return the op's module as ``load`` does, but never the one compiled ahead of time. ``verbose`` prints the build.

        If the op cannot be compiled (any more), the newest build of the installed sources in the cache is used.
        """
        with OpBuilder._load_lock:
            started = time.monotonic()
            module = jit.load(self._recipe(), verbose) if self.is_compatible(verbose) else self._load_earlier_build()
            if verbose:
                print(f"Time to load {self.name} op: {time.monotonic() - started:.2f} seconds")
            OpBuilder._loaded_ops[self.absolute_name()] = module
            return module

    def is_prebuilt(self) -> Attempt:
        """Return whether ``pip install`` compiled the op from the sources that are installed now. Does not import the op."""
        library = jit.prebuilt(self.absolute_name())
        if library is None:
            return Attempt(False, "it was not compiled ahead of time")
        try:
            # Searched for rather than imported: one process cannot load two builds of the same C++ classes.
            matches = self.source_hash().encode() in library.read_bytes()
        except OSError as error:
            return Attempt(False, f"it cannot be read: {error}")
        return Attempt(True) if matches else Attempt(False, f"{str(library)!r} was compiled from other sources")

    def existing_build(self) -> Path | None:
        """Return the compiled module that ``load`` would use, from the installation or the cache. Does not import it.

        None if ``load`` would compile one or fail. Never raises.
        """
        try:
            return jit.prebuilt(self.absolute_name()) if self.is_prebuilt() else self.cached_build()
        except OSError:
            return None

    def cached_build(self) -> Path | None:
        """Return the module in the cache that ``jit_load`` would use; None if it would compile one or fail. Raises OSError."""
        return jit.newest(self.absolute_name(), self.source_hash()) if self.obstacles() else jit.cached(self._recipe())

    def has_function(
        self, funcname: str, libraries: Sequence[str], library_dirs: Sequence[str] | None = None, verbose: bool = False
    ) -> bool:
        """Return whether a program that calls ``funcname`` links with ``libraries``. Never raises; ``verbose`` prints why not."""
        found = toolchain.find()
        if isinstance(found, Toolchain):
            program = f'extern "C" void {funcname}(void);\nint main() {{ {funcname}(); }}\n'
            attempt = found.try_program(program, tuple(libraries), tuple(library_dirs or ()))
        else:
            attempt = found
        if verbose and not attempt:
            self.warning(f"{self.name}: {funcname} was not found in {', '.join(libraries)}: {attempt.reason}")
        return attempt.ok

    def command_exists(self, cmd: str) -> bool:
        """Return whether ``cmd``, or one command of ``a|b``, can be run. Prints a warning if not."""
        names = [name.strip() for name in cmd.split("|")]
        if any(shutil.which(name) for name in names):
            return True
        wanted = f"the {names[0]!r} command" if len(names) == 1 else f"one of the commands {', '.join(names)}"
        self.warning(f"{self.name} requires {wanted}, which does not exist")
        return False

    def warning(self, msg: str) -> None:
        """Print ``[WARNING] msg``, and keep it in ``error_log``."""
        self.error_log = msg
        print(f"{WARNING} {msg}")

    def _load_prebuilt(self) -> ModuleType | None:
        """Return the module compiled ahead of time; None, with a warning, if there is one that cannot be used."""
        library = jit.prebuilt(self.absolute_name())
        if library is None:
            return None
        state = self.is_prebuilt()
        reason = state.reason
        if state:
            try:
                return jit.import_extension(self.absolute_name(), library)
            except ImportError as error:
                reason = str(error)
        from deepnvme.telemetry.callers import stack_level  # not at the top: setup.py can import nothing of deepnvme

        warnings.warn(f"the prebuilt {self.name} op is not used: {reason}. It is compiled again", stacklevel=stack_level())
        return None

    def _load_earlier_build(self) -> ModuleType:
        """Return the newest cached build of the installed sources. Raises RuntimeError if there is none, which says why."""
        failure = f"{self.name} {self.error_log}"
        try:
            library = jit.newest(self.absolute_name(), self.source_hash()) if sys.platform == "linux" else None
        except OSError as error:
            raise RuntimeError(f"{failure}; and the cache cannot be used: {error}") from error
        if library is None:
            raise RuntimeError(failure)
        try:
            return jit.import_extension(self.absolute_name(), library)
        except ImportError as error:
            raise RuntimeError(f"{failure}; and the build in the cache does not load: {error}") from error

    def _recipe(self) -> jit.Recipe:
        """Return everything that the build depends on. Raises RuntimeError if there is no compiler."""
        found = self._toolchain()
        includes: list[str] = []
        for place in self.include_paths():  # -isystem: warnings about nanobind's headers are of no use to anyone here
            includes += ["-isystem", place] if os.path.isabs(place) else [f"-I{self._path(place)}"]
        return jit.Recipe(
            name=self.absolute_name(),
            sources=tuple(self._path(source) for source in self.sources()),
            runtime_sources=tuple(self.runtime_sources()),
            source_hash=self.source_hash(),
            compile_flags=(*self.cxx_args(), *self._naming_flags(), *includes, *found.compile_flags),
            link_flags=(*found.link_flags, *self.extra_ldflags()),
            dependencies=tuple(_version_header(place) for place in self.include_paths() if os.path.isabs(place)),
            toolchain=found,
        )

    def _naming_flags(self) -> list[str]:
        """Return the flags that put the module's name and the digest of the sources into the binary."""
        extension = self.absolute_name().rpartition(".")[2]
        return [f"-DDEEPNVME_EXTENSION_NAME={extension}", f'-DDEEPNVME_SOURCE_HASH="{self.source_hash()}"']

    def _toolchain(self) -> Toolchain:
        """Return the compiler. Raises RuntimeError if there is none."""
        found = toolchain.find()
        if isinstance(found, Attempt):
            raise RuntimeError(f"{self.name} cannot be built: {found.reason}")
        return found

    @staticmethod
    def _path(path: str) -> Path:
        return _PACKAGE_ROOT / path  # an absolute path stays as it is


def stable_abi() -> bool:
    """Whether ops are compiled against Python's stable ABI: one binary then serves this Python and all later ones."""
    return sys.version_info >= (3, 12) and not sysconfig.get_config_var("Py_GIL_DISABLED")


def _after_fork() -> None:
    OpBuilder._load_lock = threading.RLock()  # a thread that the child does not have may hold the parent's


os.register_at_fork(after_in_child=_after_fork)


def _version_header(include_path: str) -> str:
    """Return a digest of the header with nanobind's version, whose path an upgrade does not change; empty for other paths."""
    with contextlib.suppress(OSError):
        return hashlib.sha256(Path(include_path, "nanobind", "nanobind.h").read_bytes()).hexdigest()
    return ""
