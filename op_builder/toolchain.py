"""The C++20 compiler: which one is used, and whether it compiles and links small programs.

The checks are cheap enough for every load: successes are recorded in the build cache, and hold while compiler and environment
stay the same. Failed checks are repeated, so a compiler installed in the meantime is noticed.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from . import cache, packages

_CANDIDATES = ("c++", "g++", "clang++")
_ENVIRONMENT = (
    "CXX", "CPPFLAGS", "CFLAGS", "CXXFLAGS", "LDFLAGS",
    "CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH", "LIBRARY_PATH", "COMPILER_PATH", "GCC_EXEC_PREFIX",
)  # fmt: skip
_TIMEOUT = 600.0  # seconds for one probe, against probes that hang; a compiler that starts cold on a busy machine took over 60

_TELLING = re.compile(r"\berror: |\bld(\.\w+)?: ")  # the line of a compiler's or linker's output that says what is wrong

_CXX20_PROGRAM = """
#include <concepts>
#include <span>
#if __cplusplus < 202002L
#error this is not a C++20 compiler
#endif
int main() { std::span<int> nothing; return static_cast<int>(nothing.size()); }
"""


@dataclass(frozen=True)
class Attempt:
    """The outcome of a trial: true if it succeeded, otherwise ``reason`` says why it failed."""

    ok: bool
    reason: str = ""

    def __bool__(self) -> bool:
        return self.ok


class TooSlow(Attempt):
    """A trial that ran out of time, which does not say whether the compiler works."""


@dataclass(frozen=True)
class Toolchain:
    """A compiler that accepts C++20, with the flags that the user's environment adds to every use of it."""

    command: tuple[str, ...]
    version: str
    compile_flags: tuple[str, ...]
    link_flags: tuple[str, ...]
    identity: str
    """Digest of everything above, of the environment and of what the compiler says of itself (with ``-march=native``
    that includes the processor), so that a build made elsewhere is not mistaken for one that runs here."""

    def try_program(self, source: str, libraries: Sequence[str] = (), library_dirs: Sequence[str] = ()) -> Attempt:
        """Compile and link ``source`` (C++); never raises. Takes 0.05 to 0.3 s."""
        try:
            with tempfile.TemporaryDirectory(prefix="deepnvme-probe-") as directory:
                program = Path(directory, "probe.cpp")
                program.write_text(source)
                output = Path(directory, "probe")
                linking = [*self.link_flags, *(f"-L{path}" for path in library_dirs), *(f"-l{name}" for name in libraries)]
                compiling = [*self.command, "-std=c++20", *self.compile_flags, str(program), "-o", str(output)]
                said = _output([*compiling, *linking])
                if isinstance(said, Attempt):
                    return said
                return Attempt(True) if output.exists() else Attempt(False, "the compiler made no program")
        except OSError as error:
            return Attempt(False, f"the probe could not be written: {error}")

    def compiles_cxx20(self) -> Attempt:
        """Return whether C++20 compiles and links. Tries it unless a success is recorded in the cache."""
        key = hashlib.sha256(repr((self.identity, _CXX20_PROGRAM)).encode()).hexdigest()[:32]
        if _is_remembered(key):
            return Attempt(True)
        attempt = self.try_program(_CXX20_PROGRAM)
        if attempt:
            _remember(key)
        return attempt


_found: dict[tuple[str | None, ...], Toolchain] = {}


def forget() -> None:
    """Clear all cached findings of this process, so that everything is looked for again."""
    _found.clear()


def find() -> Toolchain | Attempt:
    """Return the compiler named by CXX, or else the first of c++, g++ and clang++ that accepts C++20. Never raises.

    If there is none, returns a failed Attempt that says what was tried.
    """
    environment = tuple(os.environ.get(name) for name in (*_ENVIRONMENT, "PATH"))
    if environment in _found:
        return _found[environment]
    try:
        chosen = shlex.split(os.environ.get("CXX", ""))
        compile_flags = [flag for name in ("CPPFLAGS", "CFLAGS", "CXXFLAGS") for flag in _flags(name)]
        link_flags = _flags("LDFLAGS")
    except ValueError as error:
        return Attempt(False, str(error))
    reasons = []
    for command in [chosen] if chosen else [[name] for name in _CANDIDATES]:
        found = _examine(command, compile_flags, link_flags)
        if isinstance(found, Toolchain):
            _found[environment] = found
            return found
        if isinstance(found, TooSlow):
            return found
        reasons.append(f"{shlex.join(command)}: {found.reason}")
    if chosen:
        return Attempt(False, f"CXX is not a working C++20 compiler ({reasons[0]}); correct or unset CXX")
    if all(reason.endswith(": not found") for reason in reasons):
        return Attempt(False, f"no C++20 compiler (tried {', '.join(_CANDIDATES)}); install one, or set CXX")
    return Attempt(False, f"no C++20 compiler ({'; '.join(reasons)}); install one, or set CXX")


def explained(missing: Attempt) -> str:
    """Return why :func:`find` has found no compiler, with what to do."""
    slow = isinstance(missing, TooSlow)
    return f"{missing.reason} ({'try again when the machine is less busy' if slow else packages.remedy('compiler')})"


def _flags(name: str) -> list[str]:
    """Return the flags in a variable of the environment. Raises ValueError if its quotes do not match."""
    try:
        return shlex.split(os.environ.get(name, ""))
    except ValueError as error:
        raise ValueError(f"{name}={os.environ[name]!r} cannot be split into flags: {error}") from error


def _examine(command: list[str], compile_flags: list[str], link_flags: list[str]) -> Toolchain | Attempt:
    """Return a compiler with its version; a failed Attempt if it does not compile C++20."""
    path = shutil.which(command[0])
    if path is None:
        return Attempt(False, "not found")
    said = _output([*command, *compile_flags, "-v", "-E", "-x", "c++", os.devnull])
    if isinstance(said, Attempt):
        return said
    version = re.search(r"^.*\bversion \d.*$", said, re.MULTILINE)
    facts = (command, _state(Path(path).resolve()), said, compile_flags, link_flags,
             [os.environ.get(name) for name in _ENVIRONMENT])  # fmt: skip
    toolchain = Toolchain(
        command=tuple(command),
        version=version[0].strip() if version else shlex.join(command),
        compile_flags=tuple(compile_flags),
        link_flags=tuple(link_flags),
        identity=hashlib.sha256(repr(facts).encode()).hexdigest(),
    )
    return toolchain if (attempt := toolchain.compiles_cxx20()) else attempt


def _output(command: list[str]) -> str | Attempt:
    """Return the output of ``command``, or a failed Attempt."""
    environment = {**os.environ, "LC_ALL": "C"}  # the output is searched for English words
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
            env=environment, timeout=_TIMEOUT, text=True, errors="replace",
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return TooSlow(False, f"the compiler is too slow: '{shlex.join(command)}' did not end within {_TIMEOUT:g} s")
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        return Attempt(False, f"{shlex.join(command)} could not be run: {error}")
    if done.returncode != 0:
        lines = done.stdout.strip().splitlines() or [f"exit status {done.returncode}"]
        return Attempt(False, next((line for line in lines if _TELLING.search(line)), lines[-1]))
    return done.stdout


def _state(path: Path) -> tuple[int, int, int] | None:
    """Return a file's modification time, size and inode; None if there is no such file."""
    try:
        status = path.stat()
    except (OSError, ValueError):
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


def _is_remembered(key: str) -> bool:
    """Return whether a success is recorded in the cache."""
    try:
        return (cache.directory("probes") / key).exists()
    except OSError:
        return False


def _remember(key: str) -> None:
    """Record a success in the cache."""
    with contextlib.suppress(OSError):  # a cache that cannot be written costs a probe next time; building reports it properly
        (cache.directory("probes", make=True) / key).touch()
