"""The file system that fails on command: it does, and is gone when who made it is."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import deepnvme

from ..support.faulty_filesystem import FaultyFilesystem
from ..support.interpreters import REPOSITORY
from ..support.memory import page_aligned, pattern, zeros
from ..support.patience import PATIENCE, until

CONTENT = pattern(100_001)


def test_without_a_fault_it_is_a_directory_like_others(faulty_disk: FaultyFilesystem, engine: deepnvme.Engine) -> None:
    engine.write(page_aligned(CONTENT), faulty_disk / "file").result()
    engine.fsync(faulty_disk / "file").result()
    assert (faulty_disk.behind / "file").read_bytes() == CONTENT
    target = zeros(len(CONTENT))
    engine.read(target.tensor, faulty_disk / "file").result()
    assert target.content() == CONTENT
    assert engine.stats().bytes_direct == 2 * (len(CONTENT) // 4096 * 4096)
    os.rename(faulty_disk / "file", faulty_disk / "renamed")
    assert os.listdir(faulty_disk.path) == ["renamed"]


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC, errno.EDQUOT], ids=errno.errorcode.get)
def test_the_operation_asked_for_fails_once(faulty_disk: FaultyFilesystem, error: int) -> None:
    faulty_disk.fail("create", error, name="bad*")
    (faulty_disk / "good").touch()
    with pytest.raises(OSError, match="bad") as caught:
        (faulty_disk / "bad").touch()
    assert caught.value.errno == error
    (faulty_disk / "bad").touch()
    assert faulty_disk.heal() == [f"create:{errno.errorcode[error]}"]


def test_what_hangs_goes_on_when_it_is_healed(faulty_disk: FaultyFilesystem, engine: deepnvme.Engine) -> None:
    faulty_disk.fail("write", effect="hang", times=-1)
    future = engine.write(page_aligned(CONTENT[:8192]), faulty_disk / "file")
    with pytest.raises(TimeoutError):
        future.result(0.2)
    assert "write:hang" in faulty_disk.heal()
    assert future.result(PATIENCE) == 8192
    assert (faulty_disk.behind / "file").read_bytes() == CONTENT[:8192]


def test_a_write_that_is_dropped_is_called_done(faulty_disk: FaultyFilesystem, engine: deepnvme.Engine) -> None:
    faulty_disk.fail("write", effect="lie", times=-1)
    assert engine.write(page_aligned(CONTENT[:8192]), faulty_disk / "file").result() == 8192
    assert (faulty_disk.behind / "file").read_bytes() == bytes(8192)  # what was reserved


def test_it_does_not_outlive_who_made_it(direct_disk: FaultyFilesystem, drive: Path) -> None:
    inner = drive / "inner"
    inner.mkdir()
    program = f"""
import time
import weakref
from pathlib import Path
from tests.support.faulty_filesystem import faulty_filesystem
with faulty_filesystem(Path({str(inner)!r})) as disk:
    print("made", flush=True)
    time.sleep(3600)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=REPOSITORY) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "made\n"
        assert os.path.ismount(inner / "faulty")
        process.send_signal(signal.SIGKILL)
    until(lambda: not os.path.ismount(inner / "faulty"))
