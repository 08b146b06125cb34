"""What the engine asks of its backends only seldom: to cancel, to stop, to make do with an older kernel."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

PAGE = 4096


@contextmanager
def pipe() -> Iterator[tuple[int, int]]:
    """An empty one: io_uring's reads of it hang until they are cancelled or something is written."""
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


def reap(backend: Any, count: int) -> dict[int, int]:
    """So many completions by index, of which none comes twice."""
    reaped: list[tuple[int, int]] = []
    while len(reaped) < count:
        reaped += backend.reap()
    assert len(dict(reaped)) == len(reaped) == count
    return dict(reaped)


def assert_idle(backend: Any) -> None:
    """Nothing is left to reap but a wake."""
    backend.wake()
    assert backend.reap() == []


@pytest.fixture
def uring(testing: ModuleType, backends: list[Any]) -> Any:
    if "io_uring" not in backends:
        pytest.skip("needs io_uring")
    return testing.BareBackend("io_uring", 64)


@pytest.fixture
def file(drive: Path) -> Iterator[int]:
    (drive / "file").write_bytes(b"x" * 64 * PAGE)
    descriptor = os.open(drive / "file", os.O_RDWR)
    yield descriptor
    os.close(descriptor)


def test_a_read_that_hangs_in_the_ring_ends_when_it_is_cancelled(uring: Any, file: int) -> None:
    with pipe() as (empty, _):
        assert uring.submit(0, empty)
        uring.flush()
        uring.cancel(0)
        assert uring.submit(1, file)
        assert reap(uring, 2) == {0: -errno.ECANCELED, 1: PAGE}
        assert_idle(uring)


def test_a_read_that_is_still_in_the_ring_can_be_cancelled(uring: Any) -> None:
    with pipe() as (empty, _):
        assert uring.submit(0, empty)
        uring.cancel(0)
        assert uring.reap() == [(0, -errno.ECANCELED)]
        assert_idle(uring)


def test_all_that_fits_into_the_ring_can_be_cancelled_at_once(uring: Any) -> None:
    with pipe() as (empty, _):
        for _ in range(3):
            assert all(uring.submit(index, empty) for index in range(64))
            for index in range(64):
                uring.cancel(index)
            assert reap(uring, 64) == dict.fromkeys(range(64), -errno.ECANCELED)
            assert_idle(uring)


def test_a_cancel_does_not_hit_a_later_operation(uring: Any) -> None:
    with pipe() as (empty, end):
        assert uring.submit(0, empty)
        uring.flush()
        os.write(end, b"done")
        uring.cancel(0)
        assert uring.reap() in ([(0, 4)], [(0, -errno.ECANCELED)])
        assert uring.submit(0, empty)
        uring.flush()
        uring.cancel(1)  # nothing is under way there
        os.write(end, b"later")
        assert uring.reap()[0][1] > 0
        assert_idle(uring)


def test_a_wake_reaches_a_ring_of_which_all_is_in_use(uring: Any) -> None:
    with pipe() as (empty, _):
        assert all(uring.submit(index, empty) for index in range(64))
        for _ in range(3):
            waker = threading.Timer(0.01, uring.wake)
            waker.start()
            assert uring.reap() == []
            waker.join()
        assert uring.stop()


def test_a_ring_that_is_stopped_gives_up_what_hangs(uring: Any) -> None:
    with pipe() as (empty, _):
        assert all(uring.submit(index, empty) for index in range(64))
        uring.flush()
        assert uring.stop()


def test_an_operation_that_is_cancelled_completes_once_and_the_next_is_none_the_worse(
    testing: ModuleType, backend: str, file: int
) -> None:
    bare = testing.BareBackend(backend, 16)
    for attempt in range(20):
        assert all(bare.submit(index, file, offset=index * PAGE) for index in range(16))
        if attempt % 2:
            bare.flush()
        for index in range(16):
            bare.cancel(index)
        assert set(reap(bare, 16).values()) <= {PAGE, -errno.ECANCELED}
        assert all(bare.submit(index, file, offset=index * PAGE) for index in range(16))
        assert reap(bare, 16) == dict.fromkeys(range(16), PAGE)
        assert_idle(bare)
    assert bare.stop()


def wait_for_hanging(bare: Any, count: int) -> None:
    deadline = time.monotonic() + 60
    while bare.hanging() < count:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_the_thread_pool_cancels_what_no_thread_has_begun(testing: ModuleType) -> None:
    bare = testing.BareBackend("threads", 20)
    assert all(bare.submit(index, -1) for index in range(16))
    wait_for_hanging(bare, 16)
    assert all(bare.submit(index, -1) for index in range(16, 20))
    for index in (17, 19, 3):
        bare.cancel(index)
    assert reap(bare, 2) == dict.fromkeys((17, 19), -errno.ECANCELED)
    assert_idle(bare)
    bare.release()
    assert reap(bare, 18) == dict.fromkeys({*range(20)} - {17, 19}, 0)


def test_the_thread_pool_stops_without_beginning_what_is_queued(testing: ModuleType, file: int) -> None:
    bare = testing.BareBackend("threads", 17)
    assert all(bare.submit(index, -1) for index in range(16))
    wait_for_hanging(bare, 16)
    assert bare.submit(16, file, write=True)  # of zeros
    releaser = threading.Timer(0.5, bare.release)
    releaser.start()
    assert bare.stop()
    releaser.join()
    assert os.pread(file, PAGE, 0) == b"x" * PAGE


def test_a_thread_of_the_pool_that_gets_no_memory_reports_it(testing: ModuleType) -> None:
    bare = testing.BareBackend("threads", 4)
    assert bare.submit(0, -1, write=True)  # the device has none
    assert bare.reap() == [(0, -errno.ENOMEM)]


def test_operations_wait_in_the_ring_until_they_are_flushed(uring: Any) -> None:
    with pipe() as (empty, end):
        os.write(end, b"four")
        assert uring.submit(0, empty)
        assert os.read(empty, 1) == b"f"
        uring.flush()
        assert uring.reap() == [(0, 3)]


def test_more_than_the_ring_holds_is_taken_as_room_is_made(testing: ModuleType, backends: list[Any], file: int) -> None:
    if "io_uring" not in backends:
        pytest.skip("needs io_uring")
    bare = testing.BareBackend("io_uring", 7)
    for _ in range(10):
        assert all(bare.submit(index, file, offset=index * PAGE) for index in range(7))
        for index in range(7):
            bare.cancel(index)
        assert len(reap(bare, 7)) == 7


SHIM = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <liburing.h>
#include <stdio.h>
int io_uring_queue_init(unsigned entries, struct io_uring *ring, unsigned flags) {
    if (flags & REFUSED) return -EINVAL;
    struct io_uring_params parameters = {.flags = flags};
    int result = io_uring_queue_init_params(entries, ring, &parameters);
    if (result == 0) printf("%#x\\n", flags), fflush(stdout);
    return result;
}
int io_uring_register_ring_fd(struct io_uring *ring) {
    int (*real)(struct io_uring *) = (int (*)(struct io_uring *))dlsym(RTLD_NEXT, "io_uring_register_ring_fd");
    return real && REGISTERS ? real(ring) : -EINVAL;
}
"""


@pytest.mark.parametrize(
    ("refused", "taken"),
    [(0, 0x3000), (0x2000, 0x1100), (0x3000, 0x100), (0x3100, 0)],
    ids=["of Linux 6.1", "of Linux 6.0", "of Linux 5.19", "before"],
)
def test_an_older_kernel_gets_a_ring_as_it_knows_it(
    testing: ModuleType, backends: list[Any], drive: Path, refused: int, taken: int
) -> None:
    """liburing's set-up is replaced by one that refuses what that kernel does not know, and the oldest to register a ring."""
    if "io_uring" not in backends:
        pytest.skip("needs io_uring")
    if tuple(map(int, os.uname().release.split(".")[:2])) < (6, 1):
        pytest.skip("needs Linux 6.1, which knows them all")
    (drive / "shim.c").write_text(SHIM)
    shim = drive / "shim.so"
    macros = [f"-DREFUSED={refused}", f"-DREGISTERS={int(taken != 0)}"]
    subprocess.run(["cc", *macros, "-shared", "-fPIC", drive / "shim.c", "-o", shim, "-luring"], check=True)
    program = textwrap.dedent(f"""
        import errno, importlib.util, os, threading
        spec = importlib.util.spec_from_file_location({testing.__name__.rpartition(".")[2]!r}, {testing.__file__!r})
        testing = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(testing)
        bare = testing.BareBackend("io_uring", 4)
        others = []
        maker = threading.Thread(target=lambda: others.append(testing.BareBackend("io_uring", 4)))
        maker.start()
        maker.join()
        others.clear()  # registered with its maker, which is gone: what this thread has registered stays
        empty, end = os.pipe()
        bare.submit(0, empty)
        bare.flush()
        bare.wake()
        assert bare.reap() == []
        bare.cancel(0)
        assert bare.reap() == [(0, -errno.ECANCELED)]
        bare.submit(0, os.open({str(drive / "shim.c")!r}, os.O_RDONLY), length=4)
        assert bare.reap() == [(0, 4)] and bare.memory(0).decode() == {SHIM[:4]!r}
        """)
    environment = {**os.environ, "LD_PRELOAD": str(shim)}
    ran = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert [int(line, 16) for line in ran.stdout.split()] == [taken, taken]


FULL = """
#include <errno.h>
#include <liburing.h>
int refusing;
int io_uring_submit(struct io_uring *ring) { return refusing ? -EBUSY : io_uring_submit_and_wait(ring, 0); }
"""


def test_a_cancel_for_which_the_ring_has_no_entry_left_can_be_asked_for_again(
    testing: ModuleType, backends: list[Any], tmp_path: Path
) -> None:
    """liburing's submission is replaced by one that the kernel refuses for a while, so that entries fill up."""
    if "io_uring" not in backends:
        pytest.skip("needs io_uring")
    (tmp_path / "shim.c").write_text(FULL)
    shim = tmp_path / "shim.so"
    subprocess.run(["cc", "-shared", "-fPIC", tmp_path / "shim.c", "-o", shim, "-luring"], check=True)
    program = textwrap.dedent(f"""
        import ctypes, errno, importlib.util, os
        spec = importlib.util.spec_from_file_location({testing.__name__.rpartition(".")[2]!r}, {testing.__file__!r})
        testing = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(testing)
        def reap():
            while not (reaped := bare.reap()):  # cancels complete as well
                pass
            return reaped
        refusing = ctypes.c_int.in_dll(ctypes.CDLL(None), "refusing")
        bare = testing.BareBackend("io_uring", 7)
        empty, end = os.pipe()
        for index in range(3):
            assert bare.submit(index, empty)
        bare.flush()
        refusing.value = 1
        for _ in range(20):
            bare.cancel(0)
        bare.cancel(1)  # to no effect
        assert not bare.submit(3, empty)
        refusing.value = 0
        assert reap() == [(0, -errno.ECANCELED)]
        bare.cancel(1)
        assert reap() == [(1, -errno.ECANCELED)]
        os.write(end, b"four")
        assert reap() == [(2, 4)]
        assert bare.submit(3, empty)
        assert bare.stop()
        """)
    environment = {**os.environ, "LD_PRELOAD": str(shim)}
    ran = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stderr) == (0, "")
