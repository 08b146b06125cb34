"""All C++ of both ops compiled as one file, which nobody builds them as: names local to a file collide nowhere."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from deepnvme.ops.op_builder import AsyncIOBuilder, GDSBuilder, toolchain

from ..support.patience import PATIENCE

ROOT = Path(__file__).resolve().parents[2]
OPS = (AsyncIOBuilder(), GDSBuilder())


@pytest.fixture
def unit(tmp_path: Path) -> Path:
    """A file that includes every source of both ops once. Each op's module is defined under its own name."""
    sources = dict.fromkeys(source for op in OPS for source in op.sources())
    assert {ROOT / source for source in sources} == set((ROOT / "csrc").rglob("*.cpp"))
    lines = []
    for source in sources:
        if source == "csrc/bindings/gds.cpp":
            lines += ["#undef DEEPNVME_EXTENSION_NAME", "#define DEEPNVME_EXTENSION_NAME gds_op"]
        lines.append(f'#include "{ROOT / source}"')
    unit = tmp_path / "unit.cpp"
    unit.write_text("\n".join(lines) + "\n")
    return unit


@pytest.mark.slow
def test_every_source_can_be_compiled_in_one_file_with_all_others(unit: Path) -> None:
    compiler = toolchain.find()
    if isinstance(compiler, toolchain.Attempt):
        pytest.skip(f"needs a compiler: {compiler.reason}")
    op = OPS[0]
    foreign = [place for place in op.include_paths() if Path(place).is_absolute()]
    flags = [*op.cxx_args(), "-DDEEPNVME_EXTENSION_NAME=async_io_op", '-DDEEPNVME_SOURCE_HASH=""', f"-I{ROOT / 'csrc'}"]
    flags += [flag for place in foreign for flag in ("-isystem", place)]
    command = [*compiler.command, *compiler.compile_flags, *flags, "-fsyntax-only", str(unit)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
