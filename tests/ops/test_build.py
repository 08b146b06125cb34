"""``deepnvme build``: in a process of its own, with the ops that this machine has in its cache, or without a compiler."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

Ran = subprocess.CompletedProcess[str]


def run(*arguments: str) -> Ran:
    return subprocess.run([sys.executable, "-m", "deepnvme", *arguments], capture_output=True, text=True)


def test_without_a_command_the_error_names_only_the_command() -> None:
    done = run()
    assert done.returncode == 2
    assert done.stderr.endswith("error: the following arguments are required: COMMAND\n")


def test_an_op_that_cannot_be_built_ends_it_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CXX", raising=False)
    done = run("build")
    assert done.returncode == 1
    assert "deepnvme build: async_io cannot be built: no C++20 compiler" in done.stderr
    assert "async_io:" not in done.stdout


def test_an_op_that_would_not_work_here_is_left_out(op: ModuleType) -> None:
    from deepnvme.ops.op_builder import GDSBuilder

    lacking = GDSBuilder().lacking()
    if not lacking:
        pytest.skip("needs a machine on which gds would not work")
    done = run("build")
    assert done.returncode == 0, done.stderr
    assert f"gds: not built, gds cannot be used: {lacking[0]}" in done.stdout


def test_it_prints_where_the_op_is(op: ModuleType) -> None:
    done = run("build")
    assert (done.returncode, done.stderr) == (0, "")
    name, _, path = done.stdout.splitlines()[0].partition(": ")
    assert name == "async_io"
    assert Path(path).is_file()
