"""A small op to build in place of the real one, a cache of its own for each test, and compilers that misbehave."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from deepnvme.ops.op_builder import OpBuilder

REPOSITORY = Path(__file__).resolve().parents[2]

STANDIN = """
#include <Python.h>
#ifndef STANDIN_VALUE
#define STANDIN_VALUE 1
#endif
#define TEXT_(x) #x
#define TEXT(x) TEXT_(x)
#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, TEXT(DEEPNVME_EXTENSION_NAME), nullptr, -1,
                                 nullptr, nullptr, nullptr, nullptr, nullptr};
PyMODINIT_FUNC JOIN(PyInit_, DEEPNVME_EXTENSION_NAME)() {
    PyObject* module = PyModule_Create(&definition);
    PyModule_AddIntConstant(module, "value", STANDIN_VALUE);
    PyModule_AddStringConstant(module, "source_hash", DEEPNVME_SOURCE_HASH);
    return module;
}
"""

# Run by other processes, which import op_builder alone: they need not wait for torch.
STANDIN_PROGRAM = """
import sys, sysconfig
sys.path.insert(0, {repository!r})
from op_builder import OpBuilder

class StandinBuilder(OpBuilder):
    NAME = "standin"
    BUILD_VAR = "DS_BUILD_STANDIN"
    def absolute_name(self): return "standin_op"
    def sources(self): return {sources!r}
    def include_paths(self): return [sysconfig.get_path("include")]
    def cxx_args(self): return ["-std=c++20", "-fPIC"]

print(StandinBuilder().load().value)
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The build cache: empty, and of this test alone. So is what the process remembers to have loaded."""
    for name in ("CXX", "CFLAGS", "CXXFLAGS", "CPPFLAGS", "LDFLAGS", "MAX_JOBS", "CONDA_PREFIX", "DEEPNVME_BUILD_TIMEOUT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    monkeypatch.setenv("DEEPNVME_PROGRESS", "off")  # what is said while it is compiled is for tests of that
    monkeypatch.setattr(OpBuilder, "_loaded_ops", {})
    return tmp_path / "extensions" / "deepnvme"


class StandinBuilder(OpBuilder):
    """Builds ``files``, with the flags in ``flags``."""

    NAME = "standin"
    BUILD_VAR = "DS_BUILD_STANDIN"

    def __init__(self, *files: Path) -> None:
        super().__init__()
        self.files = files
        self.flags = ["-std=c++20", "-fPIC"]

    def absolute_name(self) -> str:
        return "standin_op"

    def sources(self) -> list[str]:
        return [str(file) for file in self.files]

    def include_paths(self) -> list[str]:
        import sysconfig

        return [sysconfig.get_path("include")]

    def cxx_args(self) -> list[str]:
        return self.flags


@pytest.fixture
def standin(tmp_path: Path) -> StandinBuilder:
    source = tmp_path / "standin.cpp"
    source.write_text(STANDIN)
    return StandinBuilder(source)


@pytest.fixture
def elsewhere(standin: StandinBuilder) -> Callable[..., subprocess.Popen[str]]:
    """Starts another process that loads the stand-in and prints its value."""
    program = STANDIN_PROGRAM.format(repository=str(REPOSITORY), sources=standin.sources())

    def start(**environment: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", program],
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # so that a test can end the compilers of a builder that it killed
        )

    return start


@pytest.fixture
def command(tmp_path: Path) -> Callable[[str, str], Path]:
    """Makes a shell script of that name and body in a directory of the test's commands; returns its path."""
    directory = tmp_path / "commands"
    directory.mkdir()

    def make(name: str, body: str) -> Path:
        script = directory / name
        script.write_text("#!/bin/sh\n" + textwrap.dedent(body) + "\n")
        script.chmod(0o755)
        return script

    return make


@pytest.fixture(scope="session")  # before any test changes PATH
def compiler() -> str:
    """The real compiler's path."""
    found = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if found is None:
        pytest.skip("needs a C++ compiler")
    return found
