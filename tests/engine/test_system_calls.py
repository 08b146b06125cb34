"""How often, and how, the engine calls the kernel: what each small block costs."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

Traced = Callable[[str], list[str]]


@pytest.fixture
def traced(testing: ModuleType, backends: list[Any], tmp_path: Path) -> Traced:
    """Runs a program under strace; returns its calls of io_uring_enter and of write between ``begin.`` and ``end.``.

    The programs make the calls of a worker on the main thread, and have the module ``testing``.
    """
    if "io_uring" not in backends:
        pytest.skip("needs io_uring")
    if shutil.which("strace") is None:
        pytest.skip("needs strace")

    def run(program: str) -> list[str]:
        begin = f"""
            import importlib.util, os, time
            spec = importlib.util.spec_from_file_location({testing.__name__.rpartition(".")[2]!r}, {testing.__file__!r})
            testing = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(testing)
            """
        trace = tmp_path / "trace"
        strace = ["strace", "-f", "-qq", "--seccomp-bpf", "-e", "trace=io_uring_enter,write", "-e", "signal=none", "-o", trace]
        python = [sys.executable, "-c", textwrap.dedent(begin) + textwrap.dedent(program)]
        ran = subprocess.run([*strace, *python], capture_output=True, text=True)
        if "PTRACE" in ran.stderr or "ptrace" in ran.stderr:
            pytest.skip(f"needs ptrace: {ran.stderr.strip()}")
        assert (ran.returncode, ran.stdout) == (0, "begin.end."), ran.stderr
        calls = trace.read_text().split('write(1, "begin."')[1].split('write(1, "end."')[0]
        return [line for line in calls.splitlines()[1:-1] if "resumed>" not in line]

    return run


def test_a_cycle_is_one_call_that_submits_and_waits(traced: Traced, drive: Path) -> None:
    (drive / "file").write_bytes(bytes(8 * 4096))  # in the page cache: all has completed when the call returns
    calls = traced(f"""
        bare = testing.BareBackend("io_uring", 8)
        file = os.open({str(drive / "file")!r}, os.O_RDONLY)
        os.write(1, b"begin.")
        for cycle in range(20):
            for index in range(8):
                bare.submit(index, file, offset=4096 * index)
            reaped = 0
            while reaped < 8:
                reaped += len(bare.reap())
        os.write(1, b"end.")
        """)
    assert [call for call in calls if "write(" in call] == []
    assert len(calls) == 20
    assert all(re.search(r"io_uring_enter\(\d+, 8, 1, IORING_ENTER_GETEVENTS", call) for call in calls)


def test_a_block_wakes_one_of_the_workers_that_sleep(traced: Traced, drive: Path) -> None:
    (drive / "file").write_bytes(bytes(4096))
    calls = traced(f"""
        import torch, deepnvme
        tensor = torch.empty(100, dtype=torch.uint8)
        with deepnvme.Engine("io_uring", num_threads=4) as engine, engine.open({str(drive / "file")!r}) as file:
            engine.read(tensor, file).result()
            time.sleep(0.2)
            os.write(1, b"begin.")
            for _ in range(25):
                engine.read(tensor, file).result()
                time.sleep(0.02)
            os.write(1, b"end.")
        """)
    wakes = [call for call in calls if "write(" in call]
    enters = [call for call in calls if "io_uring_enter(" in call]
    assert 0 < len(wakes) <= 25  # less where a worker was not yet asleep
    # One that submits the block and waits for it, one that waits for the next; and on a busy machine both at once.
    assert 25 <= len(enters) <= 2 * 25 + 1
