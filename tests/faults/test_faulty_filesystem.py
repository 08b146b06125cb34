"""The file system that fails on command: it does, and is gone when who made it is."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
import weakref
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


def test_the_directory_flush_fails_alone(faulty_disk: FaultyFilesystem) -> None:
    faulty_disk.fail("fsyncdir")
    descriptor = os.open(faulty_disk.path, os.O_RDONLY)
    with pytest.raises(OSError, match="Input/output"):
        os.fsync(descriptor)
    os.fsync(descriptor)
    os.close(descriptor)


@pytest.mark.parametrize("nbytes", [512, 1000, 4096, 5000])
def test_an_engine_resumes_a_read_that_was_short(direct_disk: FaultyFilesystem, engine: deepnvme.Engine, nbytes: int) -> None:
    (direct_disk.behind / "file").write_bytes(CONTENT)
    direct_disk.fail("read", effect="short", value=nbytes, times=-1)
    target = zeros(len(CONTENT))
    engine.read(target.tensor, direct_disk / "file").result()
    assert target.content() == CONTENT
    assert engine.stats().short_transfers > 0


@pytest.mark.parametrize("nbytes", [4096, 5000])
def test_an_engine_resumes_a_write_that_was_short(direct_disk: FaultyFilesystem, nbytes: int) -> None:
    direct_disk.fail("write", effect="short", value=nbytes, times=-1)
    with deepnvme.Engine("threads") as engine:
        engine.write(page_aligned(CONTENT), direct_disk / "file").result()
        assert engine.stats().short_transfers > 0
    assert (direct_disk.behind / "file").read_bytes() == CONTENT


def test_a_dropped_future_behind_a_request_that_hangs_lets_its_tensor_go(
    faulty_disk: FaultyFilesystem, engine: deepnvme.Engine, drive: Path
) -> None:
    faulty_disk.fail("write", effect="hang", times=-1)
    hanging = engine.write(page_aligned(b"x" * 4096), faulty_disk / "file")
    tensor = page_aligned(b"x" * 4096)
    alive = weakref.ref(tensor.untyped_storage())
    engine.write(tensor, drive / "file")
    del tensor
    until(lambda: alive() is None)
    assert not hanging.done()
    faulty_disk.heal()
    hanging.result()


def test_what_hangs_goes_on_when_it_is_healed(faulty_disk: FaultyFilesystem, engine: deepnvme.Engine) -> None:
    faulty_disk.fail("write", effect="hang", times=-1)
    future = engine.write(page_aligned(CONTENT[:8192]), faulty_disk / "file")
    with pytest.raises(TimeoutError):
        future.result(0.2)
    assert "write:hang" in faulty_disk.heal()
    assert future.result(PATIENCE) == 8192
    assert (faulty_disk.behind / "file").read_bytes() == CONTENT[:8192]


def test_what_hangs_for_a_time_goes_on_by_itself(faulty_disk: FaultyFilesystem, engine: deepnvme.Engine) -> None:
    faulty_disk.fail("write", effect="hang", value=300)
    begun = time.monotonic()
    engine.write(page_aligned(CONTENT[:8192]), faulty_disk / "file").result(PATIENCE)
    assert time.monotonic() - begun >= 0.3


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
