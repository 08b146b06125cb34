"""A process that stays from the first measurement to the last: neither its imports nor its allocations are ever measured."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from harness.workloads import ContenderFailed

_BENCHMARKS = Path(__file__).resolve().parent.parent


class WorkerProcess:
    """``python -m MODULE ARGUMENTS``, which ends in ``serving.serve``, and the two pipes to it.

    ``described`` is what the worker said of itself. ``variables``: of its environment, beside those of this process.
    ``prefix``: the beginning of its command line, as ``memory_limit`` yields it. Raises ContenderFailed with its last words
    if it could not begin.
    """

    def __init__(
        self, python: str, module: str, arguments: Sequence[str], directory: Path, variables: Mapping[str, str] | None = None,
        prefix: Sequence[str] = (),
    ) -> None:  # fmt: skip
        request_read, request_write = os.pipe()
        reply_read, reply_write = os.pipe()
        # Libraries print; what they say is shown only if they fail.
        self._log = tempfile.TemporaryFile()  # noqa: SIM115, closed by close()
        try:
            self._process = subprocess.Popen(
                [*prefix, python, "-m", module, *arguments, str(request_read), str(reply_write)],
                pass_fds=(request_read, reply_write),
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                cwd=directory,
                env={**_environment(python), **(variables or {})},
                # Ctrl-C is for the benchmark, which then ends this process itself.
                start_new_session=True,
            )
        except BaseException:
            os.close(request_write)
            os.close(reply_read)
            self._log.close()
            raise
        finally:
            os.close(request_read)
            os.close(reply_write)
        self._requests = os.fdopen(request_write, "w")
        self._replies = os.fdopen(reply_read)
        try:
            self.described = self._reply()
        except BaseException:
            self.close()
            raise

    def call(self, method: str, **arguments: Any) -> dict[str, Any]:
        """Have the worker do it and wait. Raises ContenderFailed with what the worker said."""
        # One that has died gives no reply, and its last words say why.
        with contextlib.suppress(BrokenPipeError):
            self._requests.write(json.dumps({"method": method, "arguments": arguments}) + "\n")
            self._requests.flush()
        return self._reply()

    def close(self) -> None:
        """End the worker, and the compilers it may have started."""
        # A worker that is idle ends when its requests do. One that is compiling is interrupted: torch's build, if killed,
        # leaves a lock behind that the next one waits for without end.
        with contextlib.suppress(BrokenPipeError):
            self._requests.close()
        for stop in (None, signal.SIGINT, signal.SIGKILL):
            if stop is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, stop)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=5)
                break
        self._replies.close()
        self._log.close()

    def __enter__(self) -> WorkerProcess:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _reply(self) -> dict[str, Any]:
        """Wait for the reply to the last call. Raises ContenderFailed if the call failed or the process died."""
        line = self._replies.readline()
        if not line:
            status = self._process.wait()
            self._log.seek(0)
            last_words = self._log.read().decode(errors="replace").strip().splitlines()[-1:]
            raise ContenderFailed(f"its process ended with {status}: {''.join(last_words) or 'no message'}")
        reply = json.loads(line)
        if "failed" in reply:
            raise ContenderFailed(reply["failed"])
        done: dict[str, Any] = reply["done"]
        return done


def importing_from(folder: Path) -> dict[str, str]:
    """``variables`` of a worker that takes packages from this folder where it has them, else those that are installed."""
    return {"PYTHONPATH": os.pathsep.join([str(folder), str(_BENCHMARKS)])}


def _environment(python: str) -> dict[str, str]:
    """The environment of a process that runs in another interpreter."""
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(_BENCHMARKS), environment.get("PYTHONPATH")]))
    # Its own ninja where there is no other, for a library that compiles when loaded. Last, because another ninja than the
    # user's reads the log of an earlier build as none and compiles anew.
    environment["PATH"] = os.pathsep.join([environment.get("PATH", os.defpath), str(Path(python).parent)])
    # Host memory is all that is measured; a GPU would only make DeepSpeed's build need nvcc.
    environment.setdefault("DS_ACCELERATOR", "cpu")
    return environment
