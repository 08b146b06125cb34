"""Workers: what they are asked, what they reply, and how they end."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import pytest
from harness.worker_process import WorkerProcess
from harness.workloads import ContenderFailed

WORKER = """
    import os
    import sys
    from harness.serving import serve

    class Worker:
        def __init__(self, mood):
            if mood == "unwilling":
                raise RuntimeError("not today")
            print("something that libraries print", flush=True)

        def describe(self):
            return {"version": "1"}

        def add(self, a, b):
            return {"sum": a + b}

        def variable(self, name):
            return {name: os.environ.get(name)}

        def die(self):
            print("last words", file=sys.stderr, flush=True)
            sys.exit(3)

    serve(lambda: Worker(sys.argv[1]), ("add", "variable", "die"), int(sys.argv[2]), int(sys.argv[3]))
"""


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "some_worker.py").write_text(textwrap.dedent(WORKER))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


def test_it_says_what_it_is_and_does_what_it_is_asked(directory: Path) -> None:
    with WorkerProcess(sys.executable, "some_worker", ["willing"], directory) as worker:
        assert worker.described == {"version": "1"}
        assert worker.call("add", a=1, b=2) == {"sum": 3}


def test_one_that_cannot_begin_says_why(directory: Path) -> None:
    with pytest.raises(ContenderFailed, match="RuntimeError: not today"):
        WorkerProcess(sys.executable, "some_worker", ["unwilling"], directory)


def test_a_request_that_fails_says_why_and_the_next_is_served(directory: Path) -> None:
    with WorkerProcess(sys.executable, "some_worker", ["willing"], directory) as worker:
        with pytest.raises(ContenderFailed, match="TypeError"):
            worker.call("add", a=1, b="2")
        assert worker.call("add", a=1, b=2) == {"sum": 3}
