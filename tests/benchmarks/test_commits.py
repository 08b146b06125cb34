"""The benchmark of two commits: each runs its own package, and both are judged. Its figures are not looked at."""

from __future__ import annotations

import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import commits
import pytest

pytestmark = pytest.mark.slow

REPOSITORY = Path(commits.__file__).parents[1]


@pytest.fixture(autouse=True)
def head() -> str:
    found = subprocess.run(["git", "rev-parse", "--verify", "HEAD"], cwd=REPOSITORY, capture_output=True, text=True)
    if found.returncode:
        pytest.skip("needs the git repository that the benchmark lies in")
    return found.stdout.strip()


def test_each_commit_runs_its_own_package_and_is_judged(drive: Path, head: str, document_of: Callable[..., Any]) -> None:
    document = document_of(commits.main, drive, "--only", "save", "--only", "raw", "--before", head)
    assert len(document["targets"]) == 4
    assert all(target["figure"]["median"] > 0 for target in document["targets"])


def test_a_commit_that_is_not_there_is_told_of(drive: Path) -> None:
    with pytest.raises(SystemExit, match="git has no commit 'nowhere'"):
        commits.main(["--quick", "--before", "nowhere", "--dir", str(drive)])


def test_a_wheel_is_unpacked_and_what_is_none_is_told_of(drive: Path) -> None:
    with zipfile.ZipFile(drive / "some.whl", "w") as wheel:
        wheel.writestr("deepnvme/__init__.py", "")
    assert (commits.check_out(str(drive / "some.whl"), drive / "unpacked") / "deepnvme" / "__init__.py").exists()
    (drive / "none.whl").write_text("")
    with pytest.raises(SystemExit, match="is no wheel"):
        commits.main(["--quick", "--before", str(drive / "none.whl"), "--dir", str(drive)])
