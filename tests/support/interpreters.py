"""Interpreters of their own, for tests of a whole process: its exit, its signals, its limits, its forks.

Importing torch takes two seconds. A server does it once, starts no thread, and forks: each fork runs one program as its
``__main__`` and then finalizes and exits as any interpreter does. In what the server had no garbage is looked for: that took each
fork 0.4 s.

Without ``whole_exit``, exits leave out torch's C++ destructors, which take 0.2 s. They come last: Python's own cleanup and the
destructors of deepnvme's modules run before them, as ever.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path

from . import patience

REPOSITORY = Path(__file__).resolve().parents[2]

_WITHOUT_TORCHS_CLEANUP = """
import ctypes
libc = ctypes.CDLL(None)
libc.on_exit(libc._exit, None)  # is called with the exit status, after what is loaded later has been cleaned up
del ctypes, libc
"""

_SERVER = f"""
import ctypes, gc, json, os, sys, warnings
prctl = ctypes.CDLL(None).prctl
prctl(1, 9)  # PR_SET_PDEATHSIG: a run of tests that is killed leaves nothing behind
sys.path.insert(0, {str(REPOSITORY)!r})
import torch
torch.empty(0)
exec(sys.argv[1])
from deepnvme.ops.op_builder import AsyncIOBuilder
from tests.native import EngineTestingBuilder
op, testing = AsyncIOBuilder().load(), EngineTestingBuilder().load()
gc.collect()
gc.freeze()
print("ready", flush=True)
while True:
    line = sys.stdin.readline()
    if not line:
        os._exit(0)
    job = json.loads(line)
    child = os.fork()
    if child == 0:
        prctl(1, 9)
        for descriptor, path in enumerate(("/dev/null", job["stdout"], job["stderr"])):
            opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666)
            os.dup2(opened, descriptor)
            os.close(opened)
        os.environ.clear()
        os.environ.update(job["environment"])
        break
    print(child, flush=True)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    print("ended", flush=True)
    # Until that has been read nobody else gets its number: who sends it a signal late does no harm.
    sys.stdin.readline()
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
warnings.simplefilter("error")
exec(compile(job["program"], "<program>", "exec"))
"""


@dataclass(frozen=True)
class Ended:
    """How a program ended: ``returncode`` as in subprocess, negative for a signal."""

    returncode: int
    stdout: str
    stderr: str
    seconds: float

    def check(self) -> str:
        """The standard output of a program that was to succeed."""
        assert self.returncode == 0, f"the program ended with {self.returncode}:\n{self.stdout}{self.stderr}"
        return self.stdout


class Interpreters:
    """Runs programs one after the other. ``op`` and ``testing``, the two native modules, are there as globals."""

    def __init__(self, directory: Path, whole_exit: bool) -> None:
        self._directory = directory
        self._before_ops = "" if whole_exit else _WITHOUT_TORCHS_CLEANUP
        self._server: subprocess.Popen[bytes] | None = None
        self._running: int | None = None  # the program that nobody has waited for
        self._read = b""

    def close(self) -> None:
        """End the server and what it runs; idempotent. The next program gets a server of its own."""
        if self._server is not None:
            os.killpg(self._server.pid, signal.SIGKILL)
            self._server.communicate()
        self._server, self._running, self._read = None, None, b""

    def run(self, program: str) -> Ended:
        """Run ``program`` to its end. One that hangs is killed and fails the test."""
        return self.wait(self.start(program))

    def start(self, program: str) -> int:
        """Start ``program`` and return its process id. Call :meth:`wait` before the next.

        If a test has failed before it called that, its program is killed first.
        """
        self.close_if_running()
        for name in ("stdout", "stderr"):
            Path(self._output(name)).write_bytes(b"")  # or what the one before has said would pass for its words
        job = {
            "program": textwrap.dedent(program),
            "stdout": self._output("stdout"),
            "stderr": self._output("stderr"),
            "environment": dict(os.environ),  # of the test, not of the one that the server was started for
        }
        try:
            if self._server is None:
                self._server = subprocess.Popen(
                    [sys.executable, "-X", "faulthandler", "-c", _SERVER, self._before_ops],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    start_new_session=True,
                )
                assert self._line() == "ready"
            self._say(json.dumps(job))
            self._started = time.monotonic()
            self._running = int(self._line())
            return self._running
        except BaseException:
            self.close()  # what it answers late would be taken for the answer about another program
            raise

    def wait(self, child: int) -> Ended:
        """Wait for the program that :meth:`start` started. One that hangs is killed and fails the test."""
        assert child == self._running
        try:
            assert self._line() == "ended"
        except TimeoutError:
            os.kill(child, signal.SIGABRT)  # faulthandler then prints where it hangs
            with contextlib.suppress(TimeoutError):
                self._line()
            self.close()
            said = f"{self._text('stdout')}{self._text('stderr')}"
            raise AssertionError(f"the program has not ended after {patience.PATIENCE} s:\n{said}") from None
        self._say("")
        returncode, self._running = int(self._line()), None
        return Ended(returncode, self._text("stdout"), self._text("stderr"), time.monotonic() - self._started)

    def close_if_running(self) -> None:
        """End a program that nobody has waited for, since its test has failed."""
        if self._running is not None:
            self.close()

    def stdout(self) -> Path:
        """Where the standard output of the program under way goes."""
        return Path(self._output("stdout"))

    def wait_for(self, text: str) -> None:
        """Wait until the program under way has printed ``text``."""
        patience.until(lambda: text in self._text("stdout"), f"that the program says '{text}'")

    def _output(self, name: str) -> str:
        return str(self._directory / name)

    def _text(self, name: str) -> str:
        return Path(self._output(name)).read_text(errors="replace")

    def _say(self, line: str) -> None:
        assert self._server is not None
        assert self._server.stdin is not None
        self._server.stdin.write(line.encode() + b"\n")
        self._server.stdin.flush()

    def _line(self) -> str:
        assert self._server is not None
        assert self._server.stdout is not None
        deadline = time.monotonic() + patience.PATIENCE
        while b"\n" not in self._read:
            if not select.select([self._server.stdout], [], [], max(deadline - time.monotonic(), 0))[0]:
                raise TimeoutError("the server of interpreters does not answer")
            more = os.read(self._server.stdout.fileno(), 4096)
            if not more:
                self.close()
                raise AssertionError("the server of interpreters has died")
            self._read += more
        line, _, self._read = self._read.partition(b"\n")
        return line.decode()
