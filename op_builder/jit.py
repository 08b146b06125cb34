"""Compile an op with ninja into the cache, once however many processes ask for it, and load it from there.

``<cache>/<op>/<key>/`` holds one build: the extension module and ``build.json``, which records how it was made and its
digest. The key covers everything that could make two builds differ. A directory under that name is complete: it was
made under another name and renamed. Anything else there was left by a killed build; the next builder removes it, which is safe
because building happens under the lock. ``cache`` makes sure that no other user has put a library there.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.machinery
import importlib.util
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from . import cache
from .toolchain import Toolchain

_SUFFIX = sysconfig.get_config_var("EXT_SUFFIX") or ".so"
_ERROR_LINES = 40  # of the compiler's output that an error message repeats; the rest is nearly always consequence
_SECONDS_PER_BYTE = 1e-4  # of one processor, for each byte of source: 31 s for the 313 kB of async_io with GCC 12
_STEP = re.compile(r"^\[(\d+)/(\d+)\]")  # of ninja's status, with NINJA_STATUS as set below


_imported: dict[tuple[str, Path], ModuleType] = vars(sys).setdefault("_deepnvme_ops", {})
"""Extension modules by name and file. A second module of the same file could not register its classes, which the process has
already. Kept where it outlives this package's removal from ``sys.modules``."""


@dataclass(frozen=True)
class Recipe:
    """Everything that determines the result of a build."""

    name: str  # absolute name of the module
    sources: tuple[Path, ...]
    source_hash: str
    compile_flags: tuple[str, ...]
    link_flags: tuple[str, ...]
    dependencies: tuple[str, ...]  # what tells versions of foreign headers apart
    toolchain: Toolchain
    runtime_sources: tuple[Path, ...] = ()  # of other packages, each compiled as a file of its own

    @property
    def extension(self) -> str:
        """Name of the extension: the last part of the module's name."""
        return self.name.rpartition(".")[2]

    @property
    def op(self) -> str:
        """Name of the op, for messages."""
        return self.extension.removesuffix("_op")

    def key(self) -> str:
        """Return the name of the build in the cache: a digest of all that can change the binary."""
        facts = (
            self.name, self.source_hash, self.compile_flags, self.link_flags, self.toolchain.identity, _SUFFIX,
            sys.version, self.dependencies, [str(path) for path in (*self.sources, *self.runtime_sources)],
        )  # fmt: skip
        return hashlib.sha256(repr(facts).encode()).hexdigest()[:24]


def load(recipe: Recipe, verbose: bool = False) -> ModuleType:
    """Return the module of a recipe, from the cache. If it is missing there, compile it first; this blocks for seconds.

    Unless DEEPNVME_PROGRESS=off, a line on stderr says that it is compiled, or that another process's build is waited for.

    Raises RuntimeError, saying what to do, if ninja is missing, the cache cannot be used, the compiler fails or the
    result does not load; TimeoutError if another process holds the build lock for longer than DEEPNVME_BUILD_TIMEOUT.
    """
    home = cache.root() / recipe.extension
    try:
        home = cache.directory(recipe.extension)
        if (module := _load_published(recipe, home / recipe.key())) is not None:
            return module
        timeout = cache.build_timeout()
        home = cache.directory(recipe.extension, make=True)
        result = home / recipe.key()
        with cache.exclusive(home / "lock", timeout, lambda holder: _announce_waiting(recipe, holder)):
            # Another process may have built it while this one waited; a damaged build was reported above and goes.
            if (module := _load_published(recipe, result, report=False)) is not None:
                return module
            for leftover in home.glob("building-*"):
                shutil.rmtree(leftover, ignore_errors=True)
            _build(recipe, result, verbose)
    except TimeoutError:
        raise
    except OSError as error:
        raise RuntimeError(
            f"{recipe.extension} cannot be built in the cache {str(home)!r}: {error}. "
            "Set TORCH_EXTENSIONS_DIR to a directory that can be written and has 64 MiB free"
        ) from error
    return import_extension(recipe.name, result / (recipe.extension + _SUFFIX))


def cached(recipe: Recipe) -> Path | None:
    """Return the module in the cache that ``load`` would use; None if it would compile one. Raises OSError without a cache."""
    library = cache.directory(recipe.extension) / recipe.key() / (recipe.extension + _SUFFIX)
    return library if _is_intact(library) else None


def newest(name: str, source_hash: str) -> Path | None:
    """Return the newest module ``name`` in the cache that was made from these sources for this Python, by any compiler.

    Used if there is no compiler, since a build's key is then unknown. Modules made for a single machine's processor are left out.
    Raises OSError if no cache can be used.
    """
    extension = name.rpartition(".")[2]
    found = []
    for library in cache.directory(extension).glob(f"*/{extension}{_SUFFIX}"):
        made = record(library)
        portable = not any(str(flag).endswith("=native") for flag in made.get("compile_flags", ()))
        if made.get("source_hash") == source_hash and portable and _is_intact(library):
            found.append((library.stat().st_mtime_ns, library))
    return max(found)[1] if found else None


def record(library: Path) -> dict[str, Any]:
    """Return the content of ``build.json`` beside a module in the cache; empty if it cannot be read. Never raises."""
    try:
        found = json.loads(cache.read(library.with_name("build.json")))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _is_intact(library: Path) -> bool:
    """Return whether the content of a module in the cache matches its record."""
    # Loading a truncated library would kill the process (SIGBUS) rather than raise.
    try:
        return hashlib.sha256(cache.read(library)).hexdigest() == record(library).get("sha256")
    except OSError:
        return False


def prebuilt(name: str) -> Path | None:
    """Return the file of the module ``name`` that an installation has compiled ahead of time, or None.

    Does not import the module, but imports its parent package.
    """
    parent = name.rpartition(".")[0]
    try:
        # Not importlib.util.find_spec, which answers with the module of that name that was loaded from the cache.
        places = importlib.import_module(parent).__path__ if parent else None
        spec = importlib.machinery.PathFinder.find_spec(name, places)
    except (ImportError, AttributeError, ValueError):
        return None
    return Path(spec.origin) if spec is not None and spec.origin is not None else None


def ninja() -> str | None:
    """Return the path of ninja: that of the Python package of this name, or the one on PATH."""
    try:
        package = importlib.import_module("ninja")
        found = shutil.which("ninja", path=package.BIN_DIR)
    except (ImportError, AttributeError):
        found = None
    return found or shutil.which("ninja")


def _load_published(recipe: Recipe, result: Path, report: bool = True) -> ModuleType | None:
    """Return the module in ``result``, or None if it cannot be used.

    Warns if the module is damaged, does not load, or could be another user's; not if it is absent.
    """
    library = result / (recipe.extension + _SUFFIX)
    try:
        recorded = json.loads(cache.read(result / "build.json"))
        # Loading a truncated library would kill the process (SIGBUS) rather than raise.
        intact = hashlib.sha256(cache.read(library)).hexdigest() == recorded["sha256"]
        if intact:
            return import_extension(recipe.name, library)
        reason = "its digest is not the one recorded when it was built"
    except (FileNotFoundError, NotADirectoryError) as error:
        if not result.exists():
            return None
        reason = str(error)
    except cache.Unusable as error:
        reason = str(error)
    except (ImportError, ValueError, LookupError, TypeError) as error:
        reason = f"{type(error).__name__}: {error}"
    if report:
        what = f"the compiled op {str(library)!r} is damaged or not to be trusted"
        from deepnvme.telemetry.callers import stack_level  # not at the top: setup.py can import nothing of deepnvme

        warnings.warn(f"{what} ({reason}); it is built again", stacklevel=stack_level())
    return None


def import_extension(name: str, library: Path) -> ModuleType:
    """Import the extension module in the file ``library`` as ``name``, once in a process, and return it. Raises ImportError."""
    library = library.resolve()
    if (imported := sys.modules.get(name)) is not None and imported.__file__ is not None:  # by an import statement, of a wheel
        _imported.setdefault((name, Path(imported.__file__).resolve()), imported)
    if (known := _imported.get((name, library))) is not None:
        sys.modules[name] = known
        return known
    loader = importlib.machinery.ExtensionFileLoader(name, str(library))
    spec = importlib.util.spec_from_file_location(name, library, loader=loader)
    if spec is None:
        raise ImportError(f"no module can be made of {str(library)!r}")
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    sys.modules[name] = module  # pickling and introspection look a class's module up there
    _imported[name, library] = module
    return module


def _build(recipe: Recipe, result: Path, verbose: bool) -> None:
    """Compile the module in a temporary directory and rename that to ``result``. Blocks. Raises RuntimeError if it fails."""
    program = ninja()
    if program is None:
        raise RuntimeError(f"{recipe.extension} cannot be built: ninja was not found; pip install ninja")
    # Not imported at the top: setup.py uses this package where nothing of deepnvme can be imported.
    from deepnvme.telemetry.progress import notice, shown_progress, silenced

    started = time.monotonic()
    notice(f"compiling {recipe.op}, once{_expected(recipe)}; it is kept in {str(result.parent)!r}")
    work = Path(tempfile.mkdtemp(prefix="building-", dir=result.parent))
    try:
        output = work / "output"
        output.mkdir()
        library = output / (recipe.extension + _SUFFIX)
        (work / "build.ninja").write_text(_build_file(recipe, write_units(recipe.sources, recipe.runtime_sources, work), library))
        command = [program, "-j", str(_jobs()), *(["-v"] if verbose else [])]
        with shown_progress(not silenced(), f"compiling {recipe.op}", "steps") as report:
            status, said = _run(command, work, report)
        if verbose:
            print(said, end="")
        if status != 0:
            raise RuntimeError(_failure(recipe, said, work))
        record = {
            "sha256": hashlib.sha256(library.read_bytes()).hexdigest(),
            "module": recipe.name,
            "source_hash": recipe.source_hash,
            "compiler": recipe.toolchain.version,
            "compile_flags": recipe.compile_flags,
            "link_flags": recipe.link_flags,
            "seconds": round(time.monotonic() - started, 2),
        }
        (output / "build.json").write_text(json.dumps(record, indent=1))
        for made in (library, output / "build.json", output):  # whatever the umask allows to others
            made.chmod(0o644 if made.suffix == ".json" else 0o755)
        if result.exists():
            os.rename(result, work / "damaged")
        os.rename(output, result)
        notice(f"compiled {recipe.op} in {time.monotonic() - started:.0f} s")
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _run(command: list[str], directory: Path, report: Callable[[int, int], None] | None) -> tuple[int, str]:
    """Run ninja, and report each step that it has finished. Return its exit status and its output."""
    environment = {**os.environ, "NINJA_STATUS": "[%f/%t] "}
    printed = []
    with subprocess.Popen(
        command, cwd=directory, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:
        try:
            assert process.stdout is not None
            for line in process.stdout:
                printed.append(line)
                if report is not None and (step := _STEP.match(line)):
                    report(int(step[1]), int(step[2]))
        except BaseException:
            process.kill()
            raise
    return process.returncode, "".join(printed)


def _expected(recipe: Recipe) -> str:
    """Return about how long the build will take, for a message; empty if that is not worth mentioning."""
    nbytes = sum(source.stat().st_size for source in recipe.sources)
    seconds = nbytes * _SECONDS_PER_BYTE / min(_jobs(), len(_units(recipe.sources, recipe.runtime_sources)))
    return f" (about {math.ceil(seconds / 10) * 10} s if the machine is idle)" if seconds >= 2 else ""


def _announce_waiting(recipe: Recipe, holder: str) -> None:
    """Say that another process is compiling the op."""
    from deepnvme.telemetry.progress import notice

    notice(f"waiting for another process that compiles {recipe.op}: {holder}")


def _jobs() -> int:
    """Return how many compilers to run at a time: MAX_JOBS, or the number of processors. Raises ValueError for a wrong value."""
    text = os.environ.get("MAX_JOBS")
    if text is None:
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if not text.strip().isdecimal() or int(text) < 1:
        raise ValueError(f"MAX_JOBS must be a whole number, 1 or more, got {text!r}")
    return int(text)


def write_units(sources: tuple[Path, ...], runtime_sources: tuple[Path, ...], work: Path) -> list[Path]:
    """Write the files that are compiled, and return them. Each includes sources, which then share their headers.

    Names local to a source must therefore differ within an op.
    """
    units = []
    for index, (name, included) in enumerate(_units(sources, runtime_sources)):
        unit = work / f"{index}-{name}.cpp"
        unit.write_text("".join(f'#include "{source}"\n' for source in included))
        units.append(unit)
    return units


def _units(sources: tuple[Path, ...], runtime_sources: tuple[Path, ...]) -> list[tuple[str, list[Path]]]:
    """Name and sources of each file to compile: of a large directory, of all small directories, of each runtime source. Few files
    of about the same size keep two processors busy to the end, and nanobind's runtime has to be a file of its own."""
    sizes: dict[Path, int] = {}
    for source in sources:
        sizes[source.parent] = sizes.get(source.parent, 0) + source.stat().st_size
    large = [directory for directory in sizes if 2 * sizes[directory] >= max(sizes.values())]
    units = [(directory.name, [source for source in sources if source.parent == directory]) for directory in large]
    units.append(("others", [source for source in sources if source.parent not in large]))
    units += [(source.stem, [source]) for source in runtime_sources]
    return [(name, included) for name, included in units if included]


def _build_file(recipe: Recipe, units: list[Path], library: Path) -> str:
    """Return the text of the build.ninja that compiles the units and links them."""

    def words(arguments: tuple[str, ...]) -> str:
        """Return arguments as a shell reads them, with ninja's escapes."""
        return shlex.join(arguments).replace("$", "$$")

    def path(value: Path) -> str:
        """Return a path with ninja's escapes."""
        return str(value).replace("$", "$$").replace(" ", "$ ").replace(":", "$:")

    compiler = words(recipe.toolchain.command)
    objects = [unit.with_suffix(".o") for unit in units]
    lines = [
        "rule compile",
        f"  command = {compiler} -c $in -o $out {words(recipe.compile_flags)}",
        "rule link",
        f"  command = {compiler} -shared $in -o $out {words(recipe.link_flags)}",
        *(f"build {path(made)}: compile {path(unit)}" for made, unit in zip(objects, units, strict=True)),
        f"build {path(library)}: link {' '.join(map(path, objects))}",
    ]
    return "\n".join(lines) + "\n"


def _failure(recipe: Recipe, output: str, work: Path) -> str:
    """Return the message about a failed build: the compiler's first errors, and a hint if the disk is full."""
    lines = output.splitlines()
    first = next((index for index, line in enumerate(lines) if line.startswith("FAILED:")), 0)
    shown = lines[first : first + _ERROR_LINES]
    if len(lines) > first + _ERROR_LINES:
        shown.append(f"... ({len(lines) - first - _ERROR_LINES} more lines)")
    free = shutil.disk_usage(work).free
    if free < 16 << 20:
        shown.append(f"Only {free} bytes are free in {str(work.parent)!r}: set TORCH_EXTENSIONS_DIR to another directory")
    return f"{recipe.extension} could not be compiled with {recipe.toolchain.version}:\n" + "\n".join(shown)
