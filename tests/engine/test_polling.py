"""Completions that drives are asked for: where they cannot be, and with a ring that takes the place of one that polls.

No drive with poll queues is needed. What is tested beside refusals is all that the kernel is not: which ring an operation goes
to, that the worker hears of a wake, of both rings' completions and of what cannot be cancelled.
"""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import deepnvme

from ..support.memory import page_aligned
from ..support.system_calls import answering

PAGE = 4096
REFUSED = "polling was refused: the drive has no poll queues, or the file system does not poll"

# A ring that is to poll becomes one that need not be asked, and nobody knows which drive a file is on. What that ring is given is
# printed.
NEED_NOT_POLL = """
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
enum { SUBMISSIONS = 0, HEAD = 10, TAIL = 11, MASK = 12 };  /* of the numbers in the second argument of SETUP */
enum { READ = 22, ENTRY_BYTES = 64 };

int fstat(int fd, struct stat *status) {
    int result = fstatat(fd, "", status, AT_EMPTY_PATH);
    status->st_dev = 0;
    return result;
}
int __fxstat(int version, int fd, struct stat *status) {  /* what fstat was before glibc 2.33, which wheels need not have */
    (void)version;
    return fstat(fd, status);
}

static struct { const unsigned *head, *tail, *mask; const unsigned char *entries; } polled[1024];  /* by descriptor */

static long set_up(long *a) {
    unsigned *parameters = (unsigned *)a[1];
    const unsigned polls = parameters[FLAGS] & POLLED;
    parameters[FLAGS] &= ~POLLED;
    const long fd = ask(SETUP, a);
    if (fd < 0) return fd;
    polled[fd].entries = NULL;  /* the descriptor may have been another ring's */
    if (!polls) return fd;
    const char *rings = mmap(NULL, 4096, PROT_READ, MAP_SHARED, fd, 0);
    polled[fd].head = (const unsigned *)(rings + parameters[HEAD]);
    polled[fd].tail = (const unsigned *)(rings + parameters[TAIL]);
    polled[fd].mask = (const unsigned *)(rings + parameters[MASK]);
    polled[fd].entries = mmap(NULL, parameters[SUBMISSIONS] * ENTRY_BYTES, PROT_READ, MAP_SHARED, fd, 0x10000000);
    return fd;
}

static long answer(long number, long *a) {
    if (number == SETUP) return set_up(a);
    if (number == REGISTER && a[1] == REGISTER_RINGS) return refuse(EINVAL);  /* rings are entered by their descriptors */
    if (number == ENTER && polled[a[0]].entries)
        for (unsigned at = *polled[a[0]].head; at != *polled[a[0]].tail; ++at) {
            fprintf(stderr, polled[a[0]].entries[(at & *polled[a[0]].mask) * ENTRY_BYTES] == READ ? "read " : "write ");
            fflush(stderr);
        }
    return ask(number, a);
}
"""


@pytest.fixture
def bare(testing: ModuleType, backends: list[Any]) -> Any:
    if "io_uring" not in backends:
        pytest.skip("needs io_uring")
    return testing.BareBackend("io_uring", 4, polling=True)


@pytest.fixture
def run_polled(backends: list[Any], testing: ModuleType, tmp_path: Path) -> Any:
    """Runs a program with that in the kernel's place; returns the operations that the ring which is to poll was given."""
    if "io_uring" not in backends:
        pytest.skip("needs io_uring")
    library = answering(NEED_NOT_POLL, tmp_path)

    def run(program: str) -> list[str]:
        begin = f"""
            import importlib.util, os, threading
            spec = importlib.util.spec_from_file_location({testing.__name__.rpartition(".")[2]!r}, {testing.__file__!r})
            testing = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(testing)
            """
        environment = {**os.environ, "LD_PRELOAD": str(library)}
        arguments = [sys.executable, "-c", textwrap.dedent(begin) + textwrap.dedent(program)]
        ran = subprocess.run(arguments, env=environment, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stderr
        return ran.stderr.split()

    return run


@pytest.mark.parametrize("backend", ["libaio", "threads"])
def test_polling_needs_io_uring(backend: Any) -> None:
    with pytest.raises(ValueError, match=f"poll needs the backend io_uring or auto, got '{backend}'"):
        deepnvme.Engine(backend=backend, poll=True)


def test_what_cannot_be_polled_for_is_refused_with_nothing_transferred(bare: Any) -> None:
    empty, end = os.pipe()
    os.write(end, b"four")
    assert bare.submit(0, empty, polled=True)
    assert bare.reap() == [(0, -errno.EOPNOTSUPP)]
    assert bare.submit(0, empty)
    assert bare.reap() == [(0, 4)]
    os.close(empty)
    os.close(end)


@pytest.mark.parametrize(("io_poll", "polls"), [("0", False), ("1", True), (None, True)])
def test_a_drive_has_the_poll_queues_that_sysfs_says(
    testing: ModuleType, tmp_path: Path, io_poll: str | None, polls: bool
) -> None:
    partition = tmp_path / "devices/nvme0n1/nvme0n1p1"
    (tmp_path / "dev/block").mkdir(parents=True)
    partition.mkdir(parents=True)
    (tmp_path / "dev/block/259:0").symlink_to(partition.parent)
    (tmp_path / "dev/block/259:1").symlink_to(partition)
    if io_poll:
        (partition.parent / "queue").mkdir()
        (partition.parent / "queue/io_poll").write_text(f"{io_poll}\n")
    assert [testing.may_have_poll_queues(259, minor, str(tmp_path)) for minor in (0, 1, 2)] == [polls, polls, True]


def test_what_a_drive_without_poll_queues_is_given_is_refused_at_once(bare: Any, testing: ModuleType, drive: Path) -> None:
    (drive / "file").write_bytes(bytes(4 * PAGE))
    device = (drive / "file").stat().st_dev
    if testing.may_have_poll_queues(os.major(device), os.minor(device), "/sys"):
        pytest.skip("needs a drive that is known to have no poll queues")
    file = os.open(drive / "file", os.O_RDONLY)
    assert all(bare.submit(index, file, offset=index * PAGE, polled=index != 2) for index in range(4))
    assert {index: result for _ in range(2) for index, result in bare.reap()} == {
        0: -errno.EOPNOTSUPP, 1: -errno.EOPNOTSUPP, 2: PAGE, 3: -errno.EOPNOTSUPP
    }  # fmt: skip
    assert bare.stop()
    os.close(file)


def test_an_engine_whose_drive_refuses_to_be_polled_goes_on_and_says_so_once(faulty: Any, drive: Path) -> None:
    engine = faulty("threads", poll=True, error_every=1, error=errno.EOPNOTSUPP, error_limit=5)
    content = bytes(range(256)) * 16 * 8
    with pytest.warns(RuntimeWarning, match=f"'{drive / 'file'}' are not polled for: {REFUSED}"):
        engine.write(page_aligned(content), drive / "file").result()
    read = page_aligned(bytes(len(content)))
    assert engine.read(read, drive / "file").result() == len(content)
    assert bytes(read.numpy()) == content
    assert engine.stats()["fallbacks"] == {REFUSED: 1}


def test_a_refusal_is_an_error_of_what_was_not_polled_for(faulty: Any, drive: Path) -> None:
    engine = faulty("threads", poll=True, error_every=1, error=errno.EOPNOTSUPP)
    error = engine.write(page_aligned(bytes(PAGE) + b"the end"), drive / "file").exception()
    assert error.errno == errno.EOPNOTSUPP  # of the page and again of the end, which is buffered


def test_an_engine_asks_for_direct_reads_and_writes_only(run_polled: Any, drive: Path) -> None:
    assert run_polled(f"""
        import torch, deepnvme
        with deepnvme.Engine(poll=True, block_size=8192) as engine:
            tensor = engine.empty_pinned(20000, dtype=torch.uint8).fill_(7)
            engine.write(tensor, {str(drive / "file")!r}).result()
            with engine.open({str(drive / "file")!r}) as file:
                assert engine.read(tensor.zero_(), file).result() == 20000
                engine.fsync(file).result()
            assert (tensor == 7).all()
            stats = engine.stats()
            assert (stats.bytes_buffered, stats.fallbacks) == (2 * 20000 - 2 * 16384, {{}}), stats
        """) == ["write", "write", "read", "read"]  # fmt: skip


def test_completions_of_both_rings_are_heard_of(run_polled: Any) -> None:
    assert run_polled("""
        bare = testing.BareBackend("io_uring", 4, polling=True)
        pipes = [os.pipe() for _ in range(4)]
        for index, (empty, end) in enumerate(pipes):
            bare.submit(index, empty, polled=index % 2 == 1)
        bare.flush()
        for index in (2, 1, 0, 3):  # the last is reaped with nothing left to poll for in between
            os.write(pipes[index][1], bytes(index + 1))
            assert bare.reap() == [(index, index + 1)]
        bare.wake()
        assert bare.reap() == []
        assert bare.stop()
        """) == ["read", "read"]  # fmt: skip


def test_a_wake_is_heard_while_a_drive_is_asked(run_polled: Any) -> None:
    run_polled("""
        bare = testing.BareBackend("io_uring", 4, polling=True)
        empty, end = os.pipe()
        bare.submit(0, empty, polled=True)
        for _ in range(3):
            waker = threading.Timer(0.05, bare.wake)
            waker.start()
            assert bare.reap() == []
            waker.join()
        os.write(end, b"four")
        assert bare.reap() == [(0, 4)]
        """)  # fmt: skip


def test_what_a_drive_is_asked_for_is_waited_for_rather_than_cancelled(run_polled: Any) -> None:
    run_polled("""
        bare = testing.BareBackend("io_uring", 4, polling=True)
        empty, end = os.pipe()
        bare.submit(0, empty, polled=True)
        bare.submit(1, empty)
        bare.flush()
        bare.cancel(0)
        bare.cancel(1)
        assert bare.reap()[0][0] == 1
        written = []
        threading.Timer(0.1, lambda: (written.append(True), os.write(end, b"four"))).start()
        assert bare.stop()
        assert written and bare.memory(0)[:4] == b"four"
        """)  # fmt: skip
