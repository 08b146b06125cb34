"""A file that did not exist before a first write that failed does not exist after it, unless somebody else may be using it."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import deepnvme

from ..support.disks import MIB, Disk, loop_disk
from ..support.memory import page_aligned
from ..support.patience import PATIENCE, until

pytestmark = pytest.mark.filterwarnings("ignore:transfers of")

# RLIMIT_FSIZE lets no file grow beyond 64 KiB. Python ignores SIGXFSZ.
LIMITED = """
import errno, resource, threading
import deepnvme
resource.setrlimit(resource.RLIMIT_FSIZE, (65536, resource.RLIM_INFINITY))
engine = deepnvme.Engine()
path = {path!r}
too_much, little = torch.ones(1 << 18), torch.ones(1 << 10)
def error_of(call):
    try:
        call()
    except OSError as error:
        return error.errno
"""

MANY = ("engine.write_many([too_much, too_much], path, [0, 1 << 20]).result()",
        "engine.write_many([too_much, too_much], [path, path + '2']).result()")  # fmt: skip
CALLS = ("engine.write(too_much, path).result()", "op.aio_handle().sync_pwrite(too_much, path)", *MANY)


@pytest.fixture
def limited(drive: Path) -> str:
    """The beginning of a program that may not make large files."""
    return LIMITED.format(path=str(drive / "file"))


@pytest.mark.parametrize("call", CALLS)
def test_a_new_file_that_may_not_grow_is_removed_again(interpreters: Any, limited: str, drive: Path, call: str) -> None:
    interpreters.run(limited + f"assert error_of(lambda: {call}) == errno.EFBIG, error_of(lambda: {call})").check()
    assert not list(drive.iterdir())


@pytest.mark.parametrize("call", CALLS)
def test_an_empty_file_that_was_there_before_stays(interpreters: Any, limited: str, drive: Path, call: str) -> None:
    (drive / "file").touch()
    interpreters.run(limited + f"assert error_of(lambda: {call}) == errno.EFBIG").check()
    assert [path.name for path in drive.iterdir()] == ["file"]


def test_a_first_write_of_nothing_makes_an_empty_file(engine: deepnvme.Engine, drive: Path) -> None:
    engine.write(page_aligned(b""), drive / "file").result()
    assert (drive / "file").stat().st_size == 0


def test_a_write_that_succeeds_keeps_its_file_whatever_others_fail_meanwhile(interpreters: Any, limited: str) -> None:
    """Nor does it matter to the process that it opens a file which it is about to remove: the kernel then sends it a signal."""
    interpreters.run(
        limited
        + """
for _ in range(1000):
    together = threading.Barrier(2)
    def fail():
        together.wait()
        for _ in range(5):
            assert error_of(lambda: engine.write(too_much, path).result()) == errno.EFBIG
    failing = threading.Thread(target=fail)
    failing.start()
    together.wait()
    engine.write(little, path).result()
    failing.join()
    assert os.path.getsize(path) == 4096
    os.unlink(path)
"""
    ).check()


@pytest.mark.parametrize("size", [0, 8192])
def test_a_write_whose_file_is_removed_as_it_opens_it_is_not_lost(engine: deepnvme.Engine, drive: Path, size: int) -> None:
    """As by a request that has failed: it holds a lease, for which others wait with opening the file. A reservation that failed
    may have left the file a size, without any data."""
    lease = os.open(drive / "file", os.O_WRONLY | os.O_CREAT)
    os.truncate(lease, size)
    fcntl.fcntl(lease, fcntl.F_SETSIG, signal.SIGURG)
    fcntl.fcntl(lease, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    tensor = page_aligned(b"x" * 4096)
    writer = threading.Thread(target=lambda: engine.write(tensor, drive / "file").result())
    writer.start()
    until(lambda: fcntl.fcntl(lease, fcntl.F_GETLEASE) != fcntl.F_WRLCK)
    (drive / "file").unlink()
    os.close(lease)
    writer.join()
    assert (drive / "file").read_bytes() == b"x" * 4096


@pytest.mark.root
def test_a_new_file_for_which_the_last_room_went_missing_is_removed_again(engine: deepnvme.Engine, small_disk: Disk) -> None:
    """What is free is enough for its bytes, and not for all that a file system needs besides."""
    there = set(small_disk.path.iterdir())
    with pytest.raises(OSError, match="bytes free") as caught:
        engine.write(page_aligned(bytes(small_disk.bytes_free())), small_disk / "file").result()
    assert caught.value.errno == errno.ENOSPC
    assert set(small_disk.path.iterdir()) == there


# Writes that fail when they have begun, where nothing can be reserved before.


@pytest.fixture
def disk_without_reservations(drive: Path) -> Iterator[Disk]:
    """32 MiB of ext4 with the block maps of ext2, which know no fallocate."""
    with loop_disk(drive, "ext4", 32 * MIB, options=("-O", "^extent,^64bit")) as disk:
        yield disk


def by_another_handle(path: Path) -> Callable[[], None]:
    file = deepnvme.Engine().open(path, "r+")
    return file.close


def by_nobody(path: Path) -> Callable[[], None]:
    return lambda: None


@pytest.mark.root
@pytest.mark.parametrize("used", [by_nobody, by_another_handle])
@pytest.mark.parametrize("many", [False, True])
def test_an_empty_file_that_somebody_else_uses_stays(
    faulty: Any, gate: Any, disk_without_reservations: Disk, used: Callable[[Path], Callable[[], None]], many: bool
) -> None:
    engine, path = faulty("threads", error_every=1, error=errno.EDQUOT, gate=gate), disk_without_reservations / "file"
    tensor = page_aligned(bytes(4096))
    future = engine.write_many([tensor, tensor], path, [0, 8192]) if many else engine.write(tensor, path)
    assert os.stat(path).st_size == 0
    close = used(path)
    gate.release()
    assert future.exception(PATIENCE).errno == errno.EDQUOT
    assert path.exists() == (used is not by_nobody)
    close()
