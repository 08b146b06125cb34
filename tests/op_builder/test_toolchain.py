"""Which compiler is taken, and what is said when none will do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from deepnvme.ops.op_builder import toolchain
from deepnvme.ops.op_builder.toolchain import Attempt, Toolchain

from .conftest import StandinBuilder

Command = Callable[[str, str], Path]

TOO_OLD = """echo "c++: error: unrecognized command-line option '-std=c++20'" >&2; exit 1"""


def found() -> Toolchain:
    toolchain_or_not = toolchain.find()
    assert isinstance(toolchain_or_not, Toolchain)
    return toolchain_or_not


def test_without_a_compiler_the_error_lists_what_was_tried(
    standin: StandinBuilder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    wanted = r"standin cannot be built: no C\+\+20 compiler \(tried c\+\+, g\+\+, clang\+\+\); install one, or set CXX"
    with pytest.raises(RuntimeError, match=wanted):
        standin.load()


@pytest.mark.parametrize("chosen", ["no-such-compiler", "false", "/", "'unbalanced", "echo"])
def test_a_wrong_cxx_is_named_and_nothing_else_is_taken_in_its_place(
    standin: StandinBuilder, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", chosen)
    assert not standin.is_compatible()
    with pytest.raises(RuntimeError, match=r"CXX|quotation"):
        standin.load()


def test_a_compiler_without_cxx20_is_passed_over(command: Command, monkeypatch: pytest.MonkeyPatch, compiler: str) -> None:
    directory = command("c++", TOO_OLD).parent
    command("g++", f'PATH=/usr/bin:/bin exec {compiler} "$@"')
    monkeypatch.setenv("PATH", str(directory))
    assert found().command == ("g++",)


@pytest.mark.parametrize("chosen", [False, True], ids=["found", "CXX"])
def test_a_compiler_that_is_only_slow_is_not_called_broken(
    standin: StandinBuilder, command: Command, monkeypatch: pytest.MonkeyPatch, chosen: bool
) -> None:
    slow = command("c++", "PATH=/usr/bin:/bin exec sleep 60")
    monkeypatch.setenv("PATH", str(slow.parent))
    monkeypatch.setattr(toolchain, "_TIMEOUT", 0.1)
    if chosen:
        monkeypatch.setenv("CXX", str(slow))
    wanted = r"standin cannot be built: the compiler is too slow: '.*' did not end within 0.1 s \(try again when the machine"
    with pytest.raises(RuntimeError, match=wanted):
        standin.load()


def test_a_compiler_installed_later_is_noticed_in_the_same_process(
    command: Command, compiler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = command("unrelated", "").parent
    monkeypatch.setenv("PATH", str(directory))
    assert isinstance(toolchain.find(), Attempt)
    command("g++", f'PATH=/usr/bin:/bin exec {compiler} "$@"')
    assert found().command == ("g++",)


def test_has_function_tells_a_function_that_links_from_one_that_does_not(
    standin: StandinBuilder, capsys: pytest.CaptureFixture[str]
) -> None:
    assert standin.has_function("cos", ("m",))
    assert not standin.has_function("no_such_function", ("m",), library_dirs=("/nowhere",), verbose=True)
    assert "no_such_function was not found in m" in capsys.readouterr().out


def test_command_exists_takes_either_of_two(standin: StandinBuilder, capsys: pytest.CaptureFixture[str]) -> None:
    assert standin.command_exists("no-such-command|sh")
    assert capsys.readouterr().out == ""
    assert not standin.command_exists("no-such-command")
    assert "[WARNING]" in capsys.readouterr().out
    assert standin.error_log is not None
    assert "'no-such-command'" in standin.error_log
