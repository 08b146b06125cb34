"""The async_io op's builder: what it says of what is missing, and the op itself, built."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from deepnvme.ops.op_builder import AsyncIOBuilder

from ..support.patience import PATIENCE
from .conftest import REPOSITORY

Command = Callable[[str, str], Path]

# Package managers by the commands that give them away, and what each installs Python's headers with.
MANAGERS = [
    (("dpkg",), "apt install python3-dev"),
    (("rpm", "dnf"), "dnf install python3-devel"),
    (("rpm",), "yum install python3-devel"),
    (("rpm", "zypper"), "zypper install python3-devel"),
    (("pacman",), "pacman -S python"),
    ((), "install Python's header files"),
]


@pytest.fixture
def only_commands(command: Command, compiler: str, monkeypatch: pytest.MonkeyPatch) -> Command:
    """As ``command``; PATH holds those commands and a compiler, and nothing else."""
    script = command("c++", f'PATH=/usr/bin:/bin exec {compiler} "$@"')
    monkeypatch.setenv("PATH", str(script.parent))
    return command


def test_a_missing_nanobind_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "nanobind", None)
    builder = AsyncIOBuilder()
    assert not builder.is_compatible()
    with pytest.raises(RuntimeError, match="pip install nanobind"):
        builder.load()
    assert capsys.readouterr().out == ""  # nothing is printed unless asked
    assert not builder.is_compatible(verbose=True)
    assert "pip install nanobind" in capsys.readouterr().out


@pytest.fixture
def without_python_headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))


@pytest.mark.usefixtures("without_python_headers")
@pytest.mark.parametrize(("commands", "advice"), MANAGERS)
def test_missing_python_headers_name_this_distributions_package(
    commands: tuple[str, ...], advice: str, only_commands: Command
) -> None:
    for name in commands:
        only_commands(name, "exit 1")
    with pytest.raises(RuntimeError, match=rf"Python.h is not in .*\((sudo )?{advice}\)"):
        AsyncIOBuilder().load()


@pytest.mark.parametrize(("version", "free_threaded", "stable"), [((3, 11), 0, False), ((3, 12), 0, True), ((3, 14), 1, False)])
def test_pythons_stable_abi_is_used_where_nanobind_can(
    version: tuple[int, int], free_threaded: int, stable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "version_info", version)
    monkeypatch.setitem(sysconfig.get_config_vars(), "Py_GIL_DISABLED", free_threaded)
    assert ("-DPy_LIMITED_API=0x030C0000" in AsyncIOBuilder().cxx_args()) == stable


def test_what_is_installed_of_nanobind_is_no_part_of_the_sources_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wheel's op is loaded where nanobind is not installed, or another version of it."""
    builder = AsyncIOBuilder()
    known = builder.source_hash()
    monkeypatch.setitem(sys.modules, "nanobind", None)
    assert builder.runtime_sources() == []
    assert builder.source_hash() == known


def test_a_subclass_adds_sources_and_gets_a_module_of_its_own_name() -> None:
    class TestingBuilder(AsyncIOBuilder):
        NAME = "engine_testing"

    assert TestingBuilder().absolute_name() == "deepnvme.ops.aio.engine_testing_op"
    assert TestingBuilder().name == "engine_testing"


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
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE, cwd=REPOSITORY, env=environment
        )
        assert done.returncode == 0, done.stderr
        seconds, library = done.stdout.split()
        assert library == op.__file__
        return float(seconds)

    assert min(load() for _ in range(3)) < 0.3
