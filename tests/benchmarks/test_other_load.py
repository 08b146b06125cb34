"""Whether others kept the machine busy while something was measured."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from harness.command_line import measuring
from harness.other_load import THRESHOLD, OtherLoad

SPIN = "import time\nend = time.monotonic() + 2\nwhile time.monotonic() < end: pass"
START = """
import subprocess, sys
print(subprocess.Popen([sys.executable, "-c", "while True: pass"], stdout=subprocess.DEVNULL).pid)
"""


@pytest.fixture
def busy() -> Iterator[None]:
    """Another process, which is nobody's child here, computes all the time."""
    started = subprocess.run([sys.executable, "-c", START], stdout=subprocess.PIPE, text=True, check=True)
    yield
    os.kill(int(started.stdout), signal.SIGKILL)


@pytest.mark.alone
def test_a_process_that_computes_meanwhile_is_counted_and_told(busy: None, capsys: pytest.CaptureFixture[str]) -> None:
    load = OtherLoad()
    with measuring("it"):
        time.sleep(2)
    assert load.cores() > 2 * THRESHOLD
    assert "it: warning: other processes used " in capsys.readouterr().err


@pytest.mark.alone
def test_what_the_benchmark_and_its_own_processes_compute_is_not_counted() -> None:
    load = OtherLoad()
    time.sleep(2)
    without = load.cores()
    load = OtherLoad()
    subprocess.run([sys.executable, "-c", SPIN], check=True)
    end = time.monotonic() + 1
    while time.monotonic() < end:
        pass
    assert load.cores() - without < 0.5  # a whole processor was used


def test_nothing_is_said_of_what_is_too_short_to_tell(capsys: pytest.CaptureFixture[str]) -> None:
    with measuring("it"):
        pass
    assert capsys.readouterr().err == ""
