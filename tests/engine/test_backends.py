"""Which backend is taken, and what happens where the kernel refuses one."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest

import deepnvme

# Has the kernel answer the system calls in `refused` with EPERM, as a container's filter does.
FILTER = """
import ctypes, os, platform, struct, sys
import deepnvme
if platform.machine() != "x86_64":
    print("skip: knows the system calls of x86_64 only"); os._exit(0)
libc = ctypes.CDLL(None, use_errno=True)
NUMBERS = {"io_uring_setup": 425, "io_setup": 206, "io_uring_enter": 426}
def refuse(*names):
    code = struct.pack("HBBI", 0x20, 0, 0, 0)  # load the number
    for name in names:
        code += struct.pack("HBBI", 0x15, 0, 1, NUMBERS[name]) + struct.pack("HBBI", 0x06, 0, 0, 0x00050001)
    install(code + struct.pack("HBBI", 0x06, 0, 0, 0x7FFF0000))
def refuse_unregistered_rings():
    code = struct.pack("HBBI", 0x20, 0, 0, 0) + struct.pack("HBBI", 0x15, 0, 3, NUMBERS["io_uring_enter"])
    code += struct.pack("HBBI", 0x20, 0, 0, 40) + struct.pack("HBBI", 0x45, 1, 0, 1 << 4)  # IORING_ENTER_REGISTERED_RING
    code += struct.pack("HBBI", 0x06, 0, 0, 0x00050001)
    install(code + struct.pack("HBBI", 0x06, 0, 0, 0x7FFF0000))
def install(code):
    buffer = ctypes.create_string_buffer(code, len(code))
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(buffer)))
    if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, program, 0, 0):
        print("skip: seccomp was refused:", os.strerror(ctypes.get_errno())); sys.stdout.flush(); os._exit(0)
"""


def run_filtered(interpreters: Any, program: str) -> str:
    output: str = interpreters.run(FILTER + program).check()
    if output.startswith("skip: "):
        pytest.skip(output.removeprefix("skip: "))
    return output


def test_the_next_backend_is_taken_where_the_kernel_refuses_io_uring(interpreters: Any, backends: list[Any]) -> None:
    if backends[:2] != ["io_uring", "libaio"]:
        pytest.skip("needs io_uring and libaio")
    run_filtered(interpreters, """
refuse("io_uring_setup")
engine = deepnvme.Engine()
assert engine.backend == "libaio", engine.backend
assert list(engine.stats().fallbacks) == ["backend io_uring: io_uring_setup: Operation not permitted"], engine.stats()
""")  # fmt: skip


def test_the_thread_pool_is_left_where_the_kernel_refuses_all_else(interpreters: Any, drive: Path) -> None:
    run_filtered(interpreters, f"""
refuse("io_uring_setup", "io_setup")
engine = deepnvme.Engine()
assert engine.backend == "threads", engine.backend
engine.write(torch.ones(10000), {str(drive / "file")!r}).result()
assert engine.read(torch.ones(10000), {str(drive / "file")!r}).result() == 40000
""")  # fmt: skip


@pytest.mark.parametrize(("name", "call"), [("io_uring", "io_uring_setup"), ("libaio", "io_setup")])
def test_a_backend_asked_for_by_name_is_not_replaced(interpreters: Any, backends: list[Any], name: str, call: str) -> None:
    if name not in backends:
        pytest.skip(f"needs {name}")
    run_filtered(interpreters, f"""
refuse({call!r})
try:
    deepnvme.Engine({name!r})
except PermissionError as error:
    assert {call!r} in str(error), error
else:
    raise AssertionError("no error")
assert op.backends()[{name!r}] is not None
""")  # fmt: skip


def test_a_ring_that_is_no_longer_served_does_not_claim_that_its_memory_is_free(interpreters: Any, backends: list[Any]) -> None:
    if "io_uring" not in backends:
        pytest.skip("needs io_uring")
    run_filtered(interpreters, """
bare = testing.BareBackend("io_uring", 4)
assert bare.stop()
bare = testing.BareBackend("io_uring", 4)
bare.submit(0, os.pipe()[0])
bare.flush()
refuse("io_uring_enter")
for call in (bare.reap, bare.reap):
    try:
        call()
    except PermissionError as error:
        assert "io_uring_enter" in str(error), error
    else:
        raise AssertionError("no error")
assert not bare.stop()
""")  # fmt: skip


@pytest.mark.alone
def test_more_events_than_the_system_allows_leave_no_worker_behind(backends: list[Any]) -> None:
    if "libaio" not in backends:
        pytest.skip("needs libaio")
    allowed = int(Path("/proc/sys/fs/aio-max-nr").read_text())
    workers = allowed // 4096 + 2
    if workers > 256:
        pytest.skip(f"fs.aio-max-nr is {allowed}: more than 256 workers can take")
    before = len(os.listdir("/proc/self/task"))
    with pytest.raises(OSError, match=r"io_setup for 4097 events \(see fs.aio-max-nr\)") as caught:
        deepnvme.Engine(backend="libaio", queue_depth=4096, num_threads=workers)
    assert caught.value.errno == errno.EAGAIN
    assert len(os.listdir("/proc/self/task")) == before
    deepnvme.Engine(backend="libaio", queue_depth=4096).close()


def test_workers_leave_signals_to_the_program(backend: Any) -> None:
    others = {thread.native_id for thread in threading.enumerate()}
    with deepnvme.Engine(backend=backend):
        for task in Path("/proc/self/task").iterdir():
            if int(task.name) in others or (task / "comm").read_text().strip() != "deepnvme":
                continue
            blocked = next(line for line in (task / "status").read_text().splitlines() if line.startswith("SigBlk:"))
            assert int(blocked.split()[1], 16) & (1 << (2 - 1))  # SIGINT
