"""Programs for the interpreter that has DeepSpeed, one process a rank."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from ..support.interpreters import REPOSITORY

VERSION = "0.19.8"
_PREFIX = "RESULTS "


def interpreter(config: pytest.Config) -> str:
    """That which was given. Skips where none was."""
    python: str | None = config.getoption("--deepspeed-python")
    if not python:
        pytest.skip(f"needs an interpreter that has DeepSpeed {VERSION}: --deepspeed-python PATH")
    return python


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """For a server that a program starts. Held meanwhile, so that no other connection of this machine is given it. Shared memory
    that DeepSpeed's collectives leave behind under its number is removed."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # the server, which does so too, can still have it
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
        try:
            yield port
        finally:
            for left in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_{port}_*"):
                left.unlink(missing_ok=True)  # 64 MiB for each rank


def environment(io_dir: Path, more: Mapping[str, str] | None = None) -> dict[str, str]:
    """For a program that imports DeepSpeed, on the CPU; without a word from torch about its threads."""
    paths = os.pathsep.join(filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH"))))
    own = {"PYTHONPATH": paths, "IO_DIR": str(io_dir), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    return {**os.environ, **own, **(more or {})}


def run(
    python: str,
    module: str,
    cases: Sequence[dict[str, Any]],
    io_dir: Path,
    *,
    ranks: int = 1,
    more: Mapping[str, str] | None = None,
) -> list[list[Any]]:
    """Of each rank what the program printed: a result for each case, and whatever else. ``more``: environment variables."""
    alike = {"WORLD_SIZE": str(ranks), "LOCAL_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    alike |= {"CROSS_RANK": "0", "CROSS_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    with contextlib.ExitStack() as held:
        directory = held.enter_context(tempfile.TemporaryDirectory())  # pipes would fill up
        alike["MASTER_PORT"] = str(held.enter_context(reserved_port()))
        processes = []
        for rank in range(ranks):
            own = environment(io_dir, {**alike, "RANK": str(rank), "LOCAL_RANK": str(rank), **(more or {})})
            with Path(directory, f"{rank}.out").open("w") as stdout, Path(directory, f"{rank}.err").open("w") as stderr:
                command, pipe = [python, "-m", module], subprocess.PIPE
                started = subprocess.Popen(command, stdin=pipe, stdout=stdout, stderr=stderr, text=True, cwd=REPOSITORY, env=own)
            processes.append(held.enter_context(started))
            held.callback(started.kill)  # where the test's time is over
            assert started.stdin is not None
            with started.stdin:
                started.stdin.write(json.dumps(list(cases)))
        codes = [started.wait() for started in processes]
        return [_results(Path(directory, str(rank)), code) for rank, code in enumerate(codes)]


def _results(base: Path, code: int) -> list[Any]:
    stdout, stderr = (base.with_suffix(suffix).read_text(errors="replace") for suffix in (".out", ".err"))
    lines = [line for line in stdout.splitlines() if line.startswith(_PREFIX)]
    assert lines, f"the program ended with {code}:\n{stdout[-4000:]}\n{stderr[-4000:]}"
    results: list[Any] = json.loads(lines[0].removeprefix(_PREFIX))
    return results
