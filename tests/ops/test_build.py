"""``deepnvme build``: in a process of its own, with the ops that this machine has in its cache, or without a compiler."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import deepnvme

Ran = subprocess.CompletedProcess[str]


def run(*arguments: str) -> Ran:
    return subprocess.run([sys.executable, "-m", "deepnvme", *arguments], capture_output=True, text=True)


def test_an_op_that_cannot_be_built_ends_it_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CXX", raising=False)
    done = run("build")
    assert done.returncode == 1
    assert "deepnvme build: async_io cannot be built: no C++20 compiler" in done.stderr
    assert "async_io:" not in done.stdout


def test_an_op_that_does_not_exist_is_refused() -> None:
    done = run("build", "async_oi")
    assert done.returncode == 2
    assert "there is no op 'async_oi'; there is async_io, gds" in done.stderr


def test_an_op_that_would_not_work_here_is_left_out_unless_it_is_named(op: ModuleType) -> None:
    from deepnvme.ops.op_builder import GDSBuilder

    lacking = GDSBuilder().lacking()
    if not lacking:
        pytest.skip("needs a machine on which gds would not work")
    done = run("build")
    assert done.returncode == 0, done.stderr
    assert f"gds: not built, gds cannot be used: {lacking[0]}" in done.stdout
    named = run("build", "gds")
    assert named.returncode == 1
    assert lacking[0] in named.stderr


def test_it_prints_where_the_op_is(op: ModuleType) -> None:
    done = run("build", "async_io")
    assert (done.returncode, done.stderr) == (0, "")
    name, _, path = done.stdout.strip().partition(": ")
    assert name == "async_io"
    assert Path(path).is_file()


@pytest.mark.parametrize("option", ["--version", "-V"])
def test_the_version_is_printed(option: str) -> None:
    done = run(option)
    assert (done.stdout, done.returncode) == (f"deepnvme {deepnvme.__version__}\n", 0)


def test_help_is_a_command_too() -> None:
    done = run("help")
    assert (done.stdout, done.returncode) == (run("--help").stdout, 0)
