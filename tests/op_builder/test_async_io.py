"""The async_io op's builder: which libraries it finds, what it says of those it does not, and the op itself, built."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from deepnvme.ops.op_builder import ALL_OPS, AsyncIOBuilder, async_io, jit, kernel, toolchain

from .conftest import REPOSITORY

Command = Callable[[str, str], Path]

URING = "-DDEEPNVME_HAVE_LIBURING=1"
LIBAIO = "-DDEEPNVME_HAVE_LIBAIO=1"

# Managers by the commands that give them away; a query that fails means: not installed
MANAGERS = [
    (("dpkg",), "please install the libaio-dev package with apt"),
    (("rpm", "dnf"), "please install the libaio-devel package with dnf"),
    (("rpm",), "please install the libaio-devel package with yum"),
    (("rpm", "zypper"), "please install the libaio-devel package with zypper"),
    (("pacman",), "please install the libaio package with pacman"),
]


@pytest.fixture
def without_libaio(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where liburing alone was found, which takes compilers a second to find out."""
    monkeypatch.setattr(async_io, "libaio", lambda: toolchain.Attempt(False, "libaio.h was not found"))
    monkeypatch.setattr(async_io, "liburing", lambda: toolchain.Attempt(True))


@pytest.fixture(scope="module")
def both_libraries() -> None:
    for package, found in (("liburing", async_io.liburing()), ("libaio", async_io.libaio())):
        if not found:
            pytest.skip(f"needs {package}'s headers and library")


@pytest.fixture
def only_commands(command: Command, compiler: str, monkeypatch: pytest.MonkeyPatch) -> Command:
    """As ``command``; PATH holds those commands and a compiler, and nothing else."""
    script = command("c++", f'PATH=/usr/bin:/bin exec {compiler} "$@"')
    monkeypatch.setenv("PATH", str(script.parent))
    return command


@pytest.mark.usefixtures("without_libaio")
@pytest.mark.parametrize(("commands", "advice"), MANAGERS)
def test_without_libaio_the_three_lines_name_this_distributions_package(
    commands: tuple[str, ...],
    advice: str,
    only_commands: Command,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in commands:
        only_commands(name, "exit 1")
    assert AsyncIOBuilder().is_compatible(verbose=True)
    lines = [line for line in capsys.readouterr().out.splitlines() if "[WARNING]" in line]
    assert "async_io requires the dev libaio .so object and headers but these were not found." in lines[0]
    assert f"async_io: {advice}" in lines[1]
    assert "try setting the CFLAGS and LDFLAGS environment variables to where it can be found." in lines[2]


@pytest.mark.usefixtures("without_libaio")
def test_in_a_conda_environment_conda_is_named(
    only_commands: Command,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    only_commands("conda", "exit 1")
    only_commands("dpkg", "exit 1")
    monkeypatch.setenv("CONDA_PREFIX", str(tmp_path))
    AsyncIOBuilder().is_compatible(verbose=True)
    assert "please install the libaio package with conda" in capsys.readouterr().out


@pytest.mark.usefixtures("without_libaio")
def test_a_package_that_is_installed_but_not_found_is_not_asked_for_again(
    only_commands: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    only_commands("dpkg", "echo 'Status: install ok installed'")
    AsyncIOBuilder().is_compatible(verbose=True)
    printed = capsys.readouterr().out
    assert "please install" not in printed
    assert "try setting the CFLAGS and LDFLAGS" in printed


@pytest.mark.usefixtures("without_libaio")
def test_a_package_that_was_removed_is_asked_for(only_commands: Command, capsys: pytest.CaptureFixture[str]) -> None:
    only_commands("dpkg", "echo 'Status: deinstall ok config-files'")
    AsyncIOBuilder().is_compatible(verbose=True)
    assert "please install the libaio-dev package with apt" in capsys.readouterr().out


@pytest.mark.usefixtures("without_libaio")
@pytest.mark.parametrize("body", ["exit 1", "kill -9 $$", "printf '\\377'"])
def test_a_package_manager_that_fails_does_not_stop_the_probe(only_commands: Command, body: str) -> None:
    only_commands("dpkg", body)
    assert AsyncIOBuilder().is_compatible(verbose=True)


@pytest.mark.parametrize(
    ("hidden", "flags", "libraries"),
    [
        ((), {URING, LIBAIO}, {"-luring", "-laio"}),
        (("libaio.h",), {URING}, {"-luring"}),
        (("liburing.h",), {LIBAIO}, {"-laio"}),
        (("libaio.h", "liburing.h"), set(), set()),
    ],
)
def test_only_the_libraries_found_are_compiled_and_linked(
    hidden: tuple[str, ...], flags: set[str], libraries: set[str], hide_header: Callable[[str], Path], both_libraries: None
) -> None:
    for header in hidden:
        hide_header(header)
    builder = AsyncIOBuilder()
    assert builder.is_compatible()
    assert {URING, LIBAIO} & set(builder.cxx_args()) == flags
    assert {"-luring", "-laio"} & set(builder.extra_ldflags()) == libraries


def test_the_backend_used_instead_is_named(hide_header: Callable[[str], Path], capsys: pytest.CaptureFixture[str]) -> None:
    hide_header("libaio.h")
    hide_header("liburing.h")
    AsyncIOBuilder().is_compatible(verbose=True)
    assert "the thread pool is used instead" in capsys.readouterr().out


@pytest.mark.usefixtures("without_libaio")
def test_nothing_is_printed_unless_asked(capsys: pytest.CaptureFixture[str]) -> None:
    AsyncIOBuilder().is_compatible()
    assert capsys.readouterr().out == ""


def test_a_missing_pybind11_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pybind11", None)
    builder = AsyncIOBuilder()
    assert not builder.is_compatible()
    with pytest.raises(RuntimeError, match="pip install pybind11"):
        builder.load()


def test_missing_python_headers_name_the_package(only_commands: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    only_commands("dpkg", "exit 1")
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    with pytest.raises(RuntimeError, match=r"Python.h is not in .*apt install python3-dev"):
        AsyncIOBuilder().load()


@pytest.mark.parametrize("probe", [kernel.io_uring, kernel.linux_aio])
def test_probing_the_kernel_leaks_no_descriptor(probe: Callable[[], toolchain.Attempt]) -> None:
    probe()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        attempt = probe()
        assert attempt.ok == (attempt.reason == "")
    assert len(os.listdir("/proc/self/fd")) == before


def test_every_op_is_listed_by_name() -> None:
    assert {name: builder.BUILD_VAR for name, builder in ALL_OPS.items()} == {
        "async_io": "DS_BUILD_AIO",
        "gds": "DS_BUILD_GDS",
        "utils": "DS_BUILD_UTILS",
    }
    assert AsyncIOBuilder().absolute_name() == "deepnvme.ops.aio.async_io_op"


def test_sources_are_those_of_the_engine_and_its_bindings() -> None:
    sources = AsyncIOBuilder().sources()
    assert sources == sorted(sources)
    assert {"csrc/engine/plan.cpp", "csrc/bindings/async_io.cpp"} <= set(sources)
    assert not any("gds" in source for source in sources)


def test_the_backends_that_were_compiled_are_seen_in_the_stripped_library(op: ModuleType, tmp_path: Path) -> None:
    strip = shutil.which("strip")
    if strip is None:
        pytest.skip("needs strip")
    library = tmp_path / "stripped.so"
    subprocess.run([strip, "--strip-all", "-o", library, str(op.__file__)], check=True)
    assert library.stat().st_size < Path(str(op.__file__)).stat().st_size
    builder = AsyncIOBuilder()
    flags = {"io_uring": URING, "libaio": LIBAIO}
    assert builder.compiled_in(library) == {name for name, flag in flags.items() if flag in builder.cxx_args()}


def test_a_subclass_adds_sources_and_gets_a_module_of_its_own_name() -> None:
    class TestingBuilder(AsyncIOBuilder):
        NAME = "engine_testing"

    assert TestingBuilder().absolute_name() == "deepnvme.ops.aio.engine_testing_op"
    assert TestingBuilder().name == "engine_testing"


WITHOUT_LIBRARIES = """
#include <iostream>
#include "engine/engine.h"
using namespace deepnvme;
int main(int, char** argv) {
    for (const auto& choice : backend_choices()) std::cout << choice.name << ": " << choice.why_not << "\\n";
    std::vector<std::byte> written(400'001, std::byte{7}), got(written.size());
    Engine engine{EngineOptions{}};
    for (const auto& request : {engine.write(written.data(), written.size(), argv[1], 100)}) request->wait();
    for (const auto& request : {engine.read(got.data(), got.size(), argv[1], 100)}) request->wait();
    return got != written;
}
"""


@pytest.mark.slow
def test_without_either_library_the_engine_is_built_and_moves_bytes(
    hide_header: Callable[[str], Path], compiler: str, tmp_path: Path
) -> None:
    """The engine alone, since nothing else of the op knows of them. With both it is built by every other test of the op."""
    csrc = REPOSITORY / "csrc"
    assert not any("DEEPNVME_HAVE" in path.read_text() for part in ("core", "bindings") for path in (csrc / part).iterdir())
    hide_header("libaio.h")
    hide_header("liburing.h")
    builder = AsyncIOBuilder()
    sources = [csrc.parent / source for source in builder.sources() if "bindings" not in source]
    main, program = tmp_path / "main.cpp", tmp_path / "program"
    main.write_text(WITHOUT_LIBRARIES)
    units = [main, *jit.write_units(tuple(sources), tmp_path)]
    flags = [os.environ["CPPFLAGS"], *builder.cxx_args(), "-O0", f"-I{csrc}"]
    subprocess.run([compiler, *flags, *units, "-o", program, *builder.extra_ldflags()], check=True, timeout=120)
    done = subprocess.run([program, tmp_path / "file"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    io_uring, libaio, threads = done.stdout.splitlines()
    assert io_uring == "io_uring: compiled out: the liburing headers were not found when the op was built"
    assert libaio == "libaio: compiled out: the libaio headers were not found when the op was built"
    assert threads == "threads: "
    assert builder.compiled_in(program) == set()


def test_the_op_loads_from_the_cache_in_a_third_of_a_second(op: ModuleType) -> None:
    """Of the processor, since others use it too, and of a process that has not loaded torch, since that is no part of it."""
    program = (
        "import os, sys; sys.path.insert(0, ''); from op_builder import AsyncIOBuilder\n"
        "before = sum(os.times()[:4]); op = AsyncIOBuilder().load(); print(sum(os.times()[:4]) - before, op.__file__)\n"
    )
    cache = str(Path(str(op.__file__)).parents[3])  # of the session: this test's own is empty

    def load() -> float:
        environment = {**os.environ, "TORCH_EXTENSIONS_DIR": cache}
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, cwd=REPOSITORY, env=environment
        )
        assert done.returncode == 0, done.stderr
        seconds, library = done.stdout.split()
        assert library == op.__file__
        return float(seconds)

    assert min(load() for _ in range(3)) < 0.3
