"""The async_io op's builder: which libraries it finds, what it says of those it does not, and the op itself, built."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from deepnvme.ops.op_builder import ALL_OPS, AsyncIOBuilder, kernel, toolchain

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
def only_commands(command: Command, compiler: str, monkeypatch: pytest.MonkeyPatch) -> Command:
    """As ``command``; PATH holds those commands and a compiler, and nothing else."""
    script = command("c++", f'PATH=/usr/bin:/bin exec {compiler} "$@"')
    monkeypatch.setenv("PATH", str(script.parent))
    return command


@pytest.mark.parametrize(("commands", "advice"), MANAGERS)
def test_without_libaio_the_three_lines_name_this_distributions_package(
    commands: tuple[str, ...],
    advice: str,
    only_commands: Command,
    hide_header: Callable[[str], Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    hide_header("libaio.h")
    for name in commands:
        only_commands(name, "exit 1")
    assert AsyncIOBuilder().is_compatible(verbose=True)
    lines = [line for line in capsys.readouterr().out.splitlines() if "[WARNING]" in line]
    assert "async_io requires the dev libaio .so object and headers but these were not found." in lines[0]
    assert f"async_io: {advice}" in lines[1]
    assert "try setting the CFLAGS and LDFLAGS environment variables to where it can be found." in lines[2]


def test_in_a_conda_environment_conda_is_named(
    only_commands: Command,
    hide_header: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    hide_header("libaio.h")
    only_commands("conda", "exit 1")
    only_commands("dpkg", "exit 1")
    monkeypatch.setenv("CONDA_PREFIX", str(tmp_path))
    AsyncIOBuilder().is_compatible(verbose=True)
    assert "please install the libaio package with conda" in capsys.readouterr().out


def test_a_package_that_is_installed_but_not_found_is_not_asked_for_again(
    only_commands: Command, hide_header: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    hide_header("libaio.h")
    only_commands("dpkg", "echo 'Status: install ok installed'")
    AsyncIOBuilder().is_compatible(verbose=True)
    printed = capsys.readouterr().out
    assert "please install" not in printed
    assert "try setting the CFLAGS and LDFLAGS" in printed


def test_a_package_that_was_removed_is_asked_for(
    only_commands: Command, hide_header: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    hide_header("libaio.h")
    only_commands("dpkg", "echo 'Status: deinstall ok config-files'")
    AsyncIOBuilder().is_compatible(verbose=True)
    assert "please install the libaio-dev package with apt" in capsys.readouterr().out


@pytest.mark.parametrize("body", ["exit 1", "kill -9 $$", "printf '\\377'"])
def test_a_package_manager_that_fails_does_not_stop_the_probe(
    only_commands: Command, hide_header: Callable[[str], Path], body: str
) -> None:
    hide_header("libaio.h")
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
    hidden: tuple[str, ...], flags: set[str], libraries: set[str], hide_header: Callable[[str], Path]
) -> None:
    found = toolchain.find()
    assert isinstance(found, toolchain.Toolchain)
    for name, header, package in (("uring", "liburing.h", "liburing"), ("aio", "libaio.h", "libaio")):
        if not found.has_library(name, header, "1"):
            pytest.skip(f"needs {package}'s headers")
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


def test_nothing_is_printed_unless_asked(hide_header: Callable[[str], Path], capsys: pytest.CaptureFixture[str]) -> None:
    hide_header("libaio.h")
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


@pytest.mark.parametrize(("backend", "part", "flag"), [("io_uring", "uring", URING), ("libaio", "libaio", LIBAIO)])
def test_a_backend_that_was_compiled_is_seen_in_the_stripped_library(
    backend: str, part: str, flag: str, compiler: str, tmp_path: Path
) -> None:
    builder = AsyncIOBuilder()
    if flag not in builder.cxx_args():
        pytest.skip(f"needs {part}'s header and library")
    library = tmp_path / "part.so"
    source = REPOSITORY / "csrc" / "engine" / f"{part}_backend.cpp"
    command = [compiler, *builder.cxx_args(), "-I", REPOSITORY / "csrc", "-shared", "-s", source, "-o", library]
    subprocess.run(command, check=True, timeout=120)
    assert builder.compiled_in(library) == {backend}


def test_a_subclass_adds_sources_and_gets_a_module_of_its_own_name() -> None:
    class TestingBuilder(AsyncIOBuilder):
        NAME = "engine_testing"

    assert TestingBuilder().absolute_name() == "deepnvme.ops.aio.engine_testing_op"
    assert TestingBuilder().name == "engine_testing"


def test_the_op_builds_without_either_library_moves_bytes_and_loads_from_the_cache_in_a_third_of_a_second(
    hide_header: Callable[[str], Path], tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """With both libraries it is built by every other test of the op. The cold build's time is recorded, not judged: it
    depends on what else the machine does."""
    hide_header("libaio.h")
    hide_header("liburing.h")
    program = (
        "import sys, time, torch; from deepnvme.ops.op_builder import AsyncIOBuilder\n"
        "start = time.perf_counter(); op = AsyncIOBuilder().load(); print(time.perf_counter() - start)\n"
        "written = torch.arange(100_000, dtype=torch.int32); got = torch.zeros_like(written)\n"
        "handle = op.aio_handle()\n"
        "handle.sync_pwrite(written, sys.argv[1]); handle.sync_pread(got, sys.argv[1])\n"
        "assert torch.equal(written, got)\n"
        "assert op.source_hash == AsyncIOBuilder().source_hash()\n"
        "from pathlib import Path; assert AsyncIOBuilder().compiled_in(Path(op.__file__)) == set()\n"
    )

    def load() -> float:
        done = subprocess.run(
            [sys.executable, "-W", "error", "-W", "ignore:Failed to initialize NumPy", "-c", program, str(tmp_path / "file")],
            capture_output=True,
            text=True,
            timeout=280,
            cwd=REPOSITORY,
        )
        assert done.returncode == 0, done.stderr
        return float(done.stdout)

    record_property("cold_build_seconds", load())
    assert min(load() for _ in range(3)) < 0.3
