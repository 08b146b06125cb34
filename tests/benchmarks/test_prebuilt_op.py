"""The benchmark of a wheel's op: each process loads its own, and all pairs count. Its figures are not looked at."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import prebuilt_op
import pytest

import deepnvme
from deepnvme.ops.op_builder import AsyncIOBuilder

pytestmark = pytest.mark.slow

PACKAGE = Path(deepnvme.__file__).parent


@pytest.fixture
def wheel(drive: Path) -> Path:
    """The package that is installed here, with the op that was compiled here in the place of one of a wheel."""
    op = AsyncIOBuilder().existing_build()
    assert op is not None
    content = drive / "content"
    ignored = shutil.ignore_patterns("__pycache__", "*.so")
    shutil.copytree(PACKAGE, content / "deepnvme", ignore=ignored)
    if not (content / "deepnvme" / "ops" / "csrc").exists():
        shutil.copytree(PACKAGE.parent / "csrc", content / "deepnvme" / "ops" / "csrc", ignore=ignored)
    shutil.copy(op, content / "deepnvme" / "ops" / "aio" / "async_io_op.so")
    return made(content, drive / "some.whl")


def made(content: Path, wheel: Path) -> Path:
    return Path(shutil.make_archive(str(wheel.with_suffix("")), "zip", content)).rename(wheel)


def test_each_pair_of_processes_counts(wheel: Path, drive: Path, document_of: Callable[..., Any]) -> None:
    document = document_of(prebuilt_op.main, drive, "--wheel", str(wheel), "--only", "read", "--only", "small write")
    assert len(document["targets"]) == 2 * 3
    assert document["contenders"]["wheel"]["prebuilt"]
    assert not document["contenders"]["compiled here"]["prebuilt"]
    for workload in document["workloads"]:
        assert len(workload["series"]) == 6
        assert all(len(series["samples"]) == 2 for series in workload["series"])


def test_a_wheel_without_an_op_is_refused(wheel: Path, drive: Path) -> None:
    (drive / "content" / "deepnvme" / "ops" / "aio" / "async_io_op.so").unlink()
    wheel = made(drive / "content", drive / "other.whl")
    with pytest.raises(SystemExit, match="has no op for this interpreter"):
        prebuilt_op.main(["--quick", "--wheel", str(wheel), "--dir", str(drive)])
