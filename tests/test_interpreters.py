"""Programs in interpreters of their own: what one test leaves behind, or an interpreter that is late, harms no other test."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from .support import patience
from .support.interpreters import REPOSITORY, Interpreters
from .support.patience import until


@pytest.fixture
def served(testing: object, tmp_path: Path) -> Iterator[Interpreters]:
    served = Interpreters(tmp_path, whole_exit=False)
    yield served
    served.close()


def test_a_program_that_hangs_fails_its_test_and_the_next_one_runs(served: Interpreters, monkeypatch: pytest.MonkeyPatch) -> None:
    child = served.start("import time\nprint('begun', flush=True)\ntime.sleep(3600)")
    served.wait_for("begun")
    with monkeypatch.context() as patch:
        patch.setattr(patience, "PATIENCE", 0.1)
        with pytest.raises(AssertionError, match=r"has not ended after 0.1 s:\nbegun"):
            served.wait(child)
    assert served.run("print('next')").check() == "next\n"


@pytest.mark.slow
def test_no_program_outlives_a_run_of_tests_that_is_killed(testing: object, tmp_path: Path) -> None:
    program = f"""
import sys
from pathlib import Path
from tests.support.interpreters import Interpreters
served = Interpreters(Path({str(tmp_path)!r}), whole_exit=False)
print(served.start("import time\\nprint('begun', flush=True)\\ntime.sleep(3600)"))
served.wait_for("begun")
print("killed", flush=True)
sys.stdin.read()
"""
    with subprocess.Popen(
        [sys.executable, "-c", program], cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as run:
        assert run.stdout is not None
        child = int(run.stdout.readline())
        assert run.stdout.readline() == "killed\n"
        run.kill()
    until(lambda: not Path(f"/proc/{child}").exists(), "the program's end")
