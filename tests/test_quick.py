"""What ``--quick`` leaves out, and what it does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from .support.examples import examples
from .support.interpreters import Interpreters


def test_a_quick_run_tries_a_quarter_of_the_examples_and_any_other_run_all(request: pytest.FixtureRequest) -> None:
    quick = request.config.getoption("--quick")
    assert (examples(60), examples(1)) == ((15, 1) if quick else (60, 1))


@pytest.mark.slow
@pytest.mark.parametrize("whole_exit", [True, False])
@pytest.mark.parametrize(("end", "status"), [("pass", 0), ("sys.exit(3)", 3), ("raise ValueError", 1)])
def test_an_exit_has_its_status_and_pythons_cleanup_also_without_torchs(
    whole_exit: bool, end: str, status: int, testing: object, tmp_path: Path
) -> None:
    interpreters = Interpreters(tmp_path, whole_exit)
    try:
        ended = interpreters.run(f"""
            import atexit, sys
            atexit.register(print, "at exit")
            print("in a buffer", end=", ")
            {end}
        """)
    finally:
        interpreters.close()
    assert (ended.returncode, ended.stdout) == (status, "in a buffer, at exit\n")
