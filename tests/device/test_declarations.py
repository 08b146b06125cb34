"""What is declared of NVIDIA's libraries, which are opened without their headers, is what the headers declare."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from deepnvme.ops.op_builder import cuda, toolchain

HERE = Path(__file__).resolve().parent


def test_declarations_are_those_of_the_headers() -> None:
    compiler, found = toolchain.find(), cuda.probe()
    if isinstance(compiler, toolchain.Attempt):
        pytest.skip(f"needs a compiler: {compiler.reason}")
    places = [Path(found.toolkit.path or "", "include"), Path(found.cufile_header.path or "").parent]
    if not (places[0] / "cuda.h").is_file() or not (places[1] / "cufile.h").is_file():
        pytest.skip("needs a CUDA toolkit's cuda.h, and its or nvidia-cufile's cufile.h")
    includes = [option for place in places for option in ("-isystem", str(place))]
    command = [*compiler.command, "-std=c++20", "-fsyntax-only", f"-I{HERE.parents[1] / 'csrc'}", *includes]
    done = subprocess.run([*command, str(HERE / "declarations.cpp")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
