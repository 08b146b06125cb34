"""The end of a handle, of an interpreter, of patience: nothing is lost, nothing hangs."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ..support.disks import MIB, Disk, loop_disk
from ..support.patience import until

COUNT = 50


def expected(drive: Path) -> bool:
    """Whether the program below has written all its files."""
    return all((drive / str(index)).read_bytes() == bytes([index]) * MIB for index in range(COUNT))


WRITES = f"""
import deepnvme
def write_all(write, drive):
    for index in range({COUNT}):
        write(torch.full(({MIB},), index, dtype=torch.uint8), drive + "/" + str(index))
"""

MAKERS = {
    "engine": "deepnvme.Engine().write",
    "engine of two workers": "deepnvme.Engine(num_threads=2).write",
    "thread pool": "deepnvme.Engine('threads').write",
    "handle": "op.aio_handle().async_pwrite",
}


@pytest.mark.slow
@pytest.mark.parametrize("maker", MAKERS)
def test_leaving_the_interpreter_writes_everything(interpreters: Any, drive: Path, maker: str) -> None:
    interpreters.run(WRITES + f"write = {MAKERS[maker]}\nwrite_all(write, {str(drive)!r})").check()
    assert expected(drive)


@pytest.mark.slow
@pytest.mark.parametrize("leave", ["sys.exit(3)", "raise ValueError", "os.kill(os.getpid(), 2)"])
def test_however_the_interpreter_is_left_everything_is_written(interpreters: Any, drive: Path, leave: str) -> None:
    interpreters.run(WRITES + f"write = deepnvme.Engine().write\nwrite_all(write, {str(drive)!r})\n{leave}")
    assert expected(drive)


@pytest.mark.parametrize("maker", MAKERS)
def test_dropping_it_writes_everything(interpreters: Any, drive: Path, maker: str) -> None:
    interpreters.run(WRITES + f"""
def inner():
    write_all({MAKERS[maker]}, {str(drive)!r})
inner()
os._exit(0)  # and nothing after
""").check()  # fmt: skip
    assert expected(drive)


@pytest.mark.slow
def test_a_thread_still_waiting_does_not_keep_the_interpreter(interpreters: Any, drive: Path) -> None:
    interpreters.run(WRITES + f"""
import threading
engine = deepnvme.Engine()
write_all(engine.write, {str(drive)!r})
def wait():
    while True:
        engine.write(torch.ones(1000), {str(drive / "more")!r}).result()
threading.Thread(target=wait, daemon=True).start()
""")  # fmt: skip
    assert expected(drive)


def test_a_request_made_while_the_interpreter_ends_is_refused_or_done(interpreters: Any, drive: Path) -> None:
    ended = interpreters.run(f"""
        import atexit, deepnvme
        def late():
            try:
                print(engine.write(torch.ones(1000), {str(drive / "late")!r}).result())
            except ValueError as error:
                print(error)
        atexit.register(late)
        engine = deepnvme.Engine()
    """)
    assert ended.check().strip() in ("4000", "the engine is closed")


@pytest.fixture
def slow_disk(drive: Path) -> Iterator[Disk]:
    """A file system that can be frozen: what is written then waits. ``file`` is 1 MiB."""
    with loop_disk(drive, "ext4", 64 * MIB) as disk:
        (disk / "file").write_bytes(bytes(MIB))
        yield disk


@pytest.mark.root
@pytest.mark.parametrize("call", ["handle.wait()", "handle.sync_pwrite(tensor, path)", "handle.write(tensor, path, False)"])
@pytest.mark.alone
def test_ctrl_c_interrupts_a_handle_that_waits(interpreters: Any, slow_disk: Disk, call: str) -> None:
    child = interpreters.start(f"""
        import time
        handle = op.aio_handle()
        tensor = torch.full(({MIB},), 7, dtype=torch.uint8)
        path = {str(slow_disk / "file")!r}
        opened = os.open(path, os.O_WRONLY | os.O_DIRECT)
        print("ready", flush=True)
        while not os.path.exists({str(slow_disk.path.parent / "frozen")!r}):
            time.sleep(0.01)
        try:
            if "wait" in {call!r}:
                handle.async_pwrite(tensor, opened)
            print("waiting", flush=True)
            {call}
        except KeyboardInterrupt:
            print("interrupted", flush=True)
        while not os.path.exists({str(slow_disk.path.parent / "thawed")!r}):
            time.sleep(0.01)
        print(handle.wait(), handle.sync_pwrite(tensor, path), handle.wait(), flush=True)
    """)
    output = interpreters.stdout()
    until(lambda: "ready" in output.read_text())
    with slow_disk.frozen():
        (slow_disk.path.parent / "frozen").touch()
        until(lambda: "waiting" in output.read_text())
        time.sleep(0.2)
        os.kill(child, signal.SIGINT)
        try:
            until(lambda: "interrupted" in output.read_text())  # while the drive is still frozen
        finally:
            slow_disk.thaw()
            (slow_disk.path.parent / "thawed").touch()
    ended = interpreters.wait(child)
    assert ended.check().split("\n")[-2] == ("1 1 0" if "wait" in call else "0 1 0")
    assert (slow_disk / "file").read_bytes() == b"\7" * MIB
