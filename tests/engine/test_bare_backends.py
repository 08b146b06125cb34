"""What the engine asks of its backends only seldom: to cancel, to stop, to make do with an older kernel."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ..support.patience import PATIENCE, until
from ..support.system_calls import answering

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


def test_a_ring_that_is_stopped_gives_up_what_hangs(uring: Any) -> None:
    with pipe() as (empty, _):
        assert all(uring.submit(index, empty) for index in range(64))
        uring.flush()
        assert uring.stop()


def wait_for_hanging(bare: Any, count: int) -> None:
    until(lambda: bare.hanging() >= count)


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


@pytest.fixture
def run_answered(testing: ModuleType, backends: list[Any], drive: Path) -> Callable[[str, str], str]:
    """Runs a program of which io_uring's system calls are answered by some C; returns what is printed."""
    if "io_uring" not in backends:
        pytest.skip("needs io_uring")

    def run(answer: str, program: str) -> str:
        begin = f"""
            import ctypes, errno, importlib.util, os, threading
            spec = importlib.util.spec_from_file_location({testing.__name__.rpartition(".")[2]!r}, {testing.__file__!r})
            testing = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(testing)
            """
        environment = {**os.environ, "LD_PRELOAD": str(answering(answer, drive))}
        arguments = [sys.executable, "-c", textwrap.dedent(begin) + textwrap.dedent(program)]
        ran = subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=PATIENCE)
        assert (ran.returncode, ran.stderr) == (0, "")
        return ran.stdout

    return run


OLDER = """
static long answer(long number, long *a) {
    const unsigned flags = number == SETUP ? ((unsigned *)a[1])[FLAGS] : 0;
    if (flags & REFUSED) return refuse(EINVAL);
    if (number == REGISTER && a[1] == REGISTER_RINGS && !REGISTERS) return refuse(EINVAL);
    const long result = ask(number, a);
    if (number == SETUP && result >= 0) printf("%#x\\n", flags), fflush(stdout);
    return result;
}
"""


@pytest.mark.parametrize(
    ("refused", "taken"),
    [(0, 0x3000), (0x2000, 0x1100), (0x3000, 0x100), (0x3100, 0)],
    ids=["of Linux 6.1", "of Linux 6.0", "of Linux 5.19", "before"],
)
def test_an_older_kernel_gets_a_ring_as_it_knows_it(
    run_answered: Callable[[str, str], str], file: int, drive: Path, refused: int, taken: int
) -> None:
    """Flags that that kernel does not know are refused, and by the oldest to register a ring."""
    if tuple(map(int, os.uname().release.split(".")[:2])) < (6, 1):
        pytest.skip("needs Linux 6.1, which knows them all")
    macros = f"#define REFUSED {refused}\n#define REGISTERS {int(taken != 0)}\n"
    printed = run_answered(macros + OLDER, f"""
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
        bare.submit(0, os.open({str(drive / "file")!r}, os.O_RDONLY), length=4)
        assert bare.reap() == [(0, 4)] and bare.memory(0).decode() == "xxxx"
        """)  # fmt: skip
    assert [int(line, 16) for line in printed.split()] == [taken, taken]


REFUSING = """
int refusal; /* the error with which to refuse, or 0 */
static long answer(long number, long *a) { return number == ENTER && refusal ? refuse(refusal) : ask(number, a); }
"""


@pytest.mark.parametrize("error", [errno.EBADR, errno.EPERM], ids=["a completion was lost", "it may be asked again"])
def test_a_ring_that_is_refused_says_so_and_is_stopped_unless_a_completion_was_lost(
    run_answered: Callable[[str, str], str], error: int
) -> None:
    """The kernel says EBADR once, and the memory of the operation that it has lost must be kept for good."""
    run_answered(REFUSING, f"""
        refusal = ctypes.c_int.in_dll(ctypes.CDLL(None), "refusal")
        bare = testing.BareBackend("io_uring", 4)
        empty, end = os.pipe()
        assert bare.submit(0, empty)
        bare.flush()
        refusal.value = {error}
        told = []
        for call in (bare.reap, bare.reap, bare.flush):
            try:
                call()
            except OSError as refused:
                told.append((refused.errno, str(refused).partition(": ")[2]))
            refusal.value = 0
        assert told == [({error}, "io_uring_enter")] * 3, told
        assert bare.stop() == {error != errno.EBADR}
        """)  # fmt: skip


ONE_AT_A_TIME = """
static long answer(long number, long *a) {
    if (number == ENTER && (unsigned)a[2] > 1) a[2] = 1;
    return ask(number, a);
}
"""


def test_entries_that_the_kernel_has_not_taken_go_out_with_the_next_submission(
    run_answered: Callable[[str, str], str], file: int, drive: Path
) -> None:
    run_answered(ONE_AT_A_TIME, f"""
        bare = testing.BareBackend("io_uring", 7)
        file = os.open({str(drive / "file")!r}, os.O_RDONLY)
        for _ in range(3):
            assert all(bare.submit(index, file, length=index + 1) for index in range(7))
            bare.flush()
            reaped = []
            while len(reaped) < 7:
                reaped += bare.reap()
            assert sorted(reaped) == [(index, index + 1) for index in range(7)]
        assert bare.stop()
        """)  # fmt: skip


FULL = """
int refusing;
static long answer(long number, long *a) { return number == ENTER && refusing ? refuse(EBUSY) : ask(number, a); }
"""


def test_a_cancel_for_which_the_ring_has_no_entry_left_can_be_asked_for_again(run_answered: Callable[[str, str], str]) -> None:
    """The kernel takes nothing for a while, so that entries fill up."""
    run_answered(FULL, """
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
        """)  # fmt: skip
