"""What somebody sees whose first use compiles an op: lines on stderr, progress on a terminal, nothing on stdout."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from ..support.patience import PATIENCE
from .conftest import StandinBuilder

Elsewhere = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture(autouse=True)
def not_silenced(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DEEPNVME_PROGRESS")


def test_a_build_says_what_is_compiled_and_where_it_is_kept_and_then_how_long_it_took(
    standin: StandinBuilder, cache: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    standin.load()
    out, err = capfd.readouterr()
    assert out == ""
    begun, ended = err.splitlines()
    assert begun == f"deepnvme: compiling standin, once; it is kept in {str(cache / 'standin_op')!r}"
    assert re.fullmatch(r"deepnvme: compiled standin in \d+ s", ended)


@pytest.fixture
def held_compiler(tmp_path: Path, compiler: str) -> Path:
    """Compiles nothing until there is a file ``go on`` beside it."""
    held = tmp_path / "held-c++"
    wait = f"while [ ! -e '{tmp_path}/go on' ]; do sleep 0.05; done"
    held.write_text(f'#!/bin/sh\ncase " $* " in *" -c "*) {wait};; esac\nexec {compiler} "$@"\n')
    held.chmod(0o755)
    return held


def test_what_takes_long_is_announced_with_its_time(
    standin: StandinBuilder, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    standin.files[0].write_text(standin.files[0].read_text() + "// " + "x" * 200_000 + "\n")
    monkeypatch.setenv("MAX_JOBS", "2")
    standin.load()
    assert "compiling standin, once (about 30 s if the machine is idle)" in capfd.readouterr().err


@pytest.mark.parametrize("word", ["off", "0", "OFF"])
def test_it_is_silenced_by_the_environment(
    standin: StandinBuilder, word: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEEPNVME_PROGRESS", word)
    standin.load()
    assert capfd.readouterr() == ("", "")


def test_a_process_that_waits_for_the_build_of_another_says_so_once(elsewhere: Elsewhere, held_compiler: Path) -> None:
    builder = elsewhere(CXX=str(held_compiler))
    assert builder.stderr is not None
    assert "compiling standin" in builder.stderr.readline()
    waiting = elsewhere(CXX=str(held_compiler))
    assert waiting.stderr is not None
    line = waiting.stderr.readline()
    assert line.startswith(f"deepnvme: waiting for another process that compiles standin: process {builder.pid} on ")
    held_compiler.with_name("go on").touch()
    assert waiting.communicate(timeout=PATIENCE) == ("1\n", "")
    assert builder.communicate(timeout=PATIENCE)[0] == "1\n"
