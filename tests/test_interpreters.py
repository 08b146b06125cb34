"""Programs in interpreters of their own: what one test leaves behind, or an interpreter that is late, harms no other test."""

from __future__ import annotations

import os
import signal
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


def test_the_answers_of_a_server_that_was_late_are_not_taken_for_the_next_program(
    served: Interpreters, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(patience, "PATIENCE", 0.0)
        with pytest.raises(TimeoutError):
            served.start("print('late')")
    assert [served.run(f"print({number})").check() for number in range(3)] == ["0\n", "1\n", "2\n"]


def test_what_has_ended_can_be_killed_until_its_end_is_waited_for(served: Interpreters) -> None:
    child = served.start("import sys\nprint('said', flush=True)\nsys.exit(3)")
    until(lambda: Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0] == "Z")
    os.kill(child, signal.SIGKILL)
    assert (served.wait(child).returncode, served.run("print(1)").check()) == (3, "1\n")


def test_a_program_that_a_failed_test_has_left_ends_with_that_test(served: Interpreters) -> None:
    child = served.start("import time\ntime.sleep(3600)")
    served.close_if_running()
    until(lambda: not Path(f"/proc/{child}").exists(), "the program's end")
    served.close_if_running()  # does nothing
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
