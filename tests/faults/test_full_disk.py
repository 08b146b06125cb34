"""A full disk is told before the first byte, and what was there stays there."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import threading
from typing import Any

import pytest

import deepnvme

from ..support.disks import MIB, Disk
from ..support.memory import page_aligned, pattern

pytestmark = [pytest.mark.root, pytest.mark.filterwarnings("ignore:transfers of")]


@pytest.fixture
def too_much(small_disk: Disk) -> int:
    """A MiB more bytes than are free."""
    return small_disk.bytes_free() // MIB * MIB + 2 * MIB


def test_disk_full_is_reported_before_any_byte_is_written(engine: deepnvme.Engine, small_disk: Disk, too_much: int) -> None:
    free = small_disk.bytes_free()
    with pytest.raises(OSError, match=rf"write of {too_much} bytes at offset 0 \(\d+ bytes free\)") as caught:
        engine.write(page_aligned(bytes(too_much)), small_disk / "file")
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(small_disk / "file"))
    said = int(re.search(r"(\d+) bytes free", str(caught.value))[1])  # type: ignore[index]
    facts = os.statvfs(small_disk.path)
    assert abs(said - facts.f_bavail * facts.f_frsize) <= 65536
    assert not (small_disk / "file").exists()
    assert engine.stats().bytes_written == 0
    assert free - small_disk.bytes_free() <= 4096


def test_what_is_reserved_does_not_count_as_free(engine: deepnvme.Engine, small_disk: Disk) -> None:
    """Less than df's free blocks, and more than even root may have."""
    wanted = small_disk.bytes_free() // 4096 * 4096 - 16384
    tensor = page_aligned(bytes(wanted))

    with pytest.raises(OSError, match=r"\d+ bytes free, and \d+ reserved for root or the file system") as caught:
        engine.write(tensor, small_disk / "file").result()
    found = re.search(r"(\d+) bytes free, and (\d+) reserved", str(caught.value))
    assert found is not None
    free, reserved = map(int, found.groups())
    assert free < wanted <= free + reserved


@pytest.mark.parametrize("mode", ["w", "x+", "rw"])
@pytest.mark.parametrize("reserved", [False, True], ids=["too much at once", "too much when it is reserved"])
def test_a_file_made_for_a_write_that_does_not_fit_is_removed(
    engine: deepnvme.Engine, small_disk: Disk, too_much: int, mode: Any, reserved: bool
) -> None:
    there = set(small_disk.path.iterdir())
    wanted = small_disk.bytes_free() // 4096 * 4096 - 16384 if reserved else too_much
    with engine.open(small_disk / "file", mode) as file, pytest.raises(OSError, match="bytes free"):
        engine.write(page_aligned(bytes(wanted)), file).result()
    assert set(small_disk.path.iterdir()) == there


def test_a_file_that_was_there_or_has_something_stays_when_a_write_does_not_fit(
    engine: deepnvme.Engine, small_disk: Disk, too_much: int
) -> None:
    (small_disk / "empty").touch()
    with engine.open(small_disk / "empty", "r+") as empty, engine.open(small_disk / "written", "w") as written:
        engine.write(page_aligned(b"y" * 4096), written).result()
        for file in (empty, written):
            with pytest.raises(OSError, match="bytes free"):
                engine.write(page_aligned(bytes(too_much)), file, 4096).result()
    with engine.open(small_disk / "unused", "w"):
        pass
    assert [(small_disk / name).stat().st_size for name in ("empty", "written", "unused")] == [0, 4096, 0]


@pytest.mark.parametrize("offset", [0, 5000, 10 * MIB])
def test_a_file_that_cannot_grow_stays_as_it_was(engine: deepnvme.Engine, small_disk: Disk, too_much: int, offset: int) -> None:
    (small_disk / "file").write_bytes(b"x" * 10_000)
    free = small_disk.bytes_free()
    with pytest.raises(OSError, match="bytes free"):
        engine.write(page_aligned(b"y" * too_much), small_disk / "file", offset)
    assert (small_disk / "file").read_bytes() == b"x" * 10_000
    assert free - small_disk.bytes_free() <= 4096


def test_what_was_there_can_be_overwritten_on_a_full_disk(engine: deepnvme.Engine, small_disk: Disk) -> None:
    (small_disk / "file").write_bytes(bytes(5 * MIB))
    fill(small_disk)
    engine.write(page_aligned(b"y" * 5 * MIB), small_disk / "file").result()
    assert (small_disk / "file").read_bytes() == b"y" * 5 * MIB


def test_a_disk_that_fills_up_midway_is_an_error_of_that_request(engine: deepnvme.Engine, small_disk: Disk, backend: Any) -> None:
    """The holes of a sparse file are not reserved beforehand."""
    with (small_disk / "sparse").open("wb") as file:
        file.truncate(20 * MIB)
    (small_disk / "room").write_bytes(bytes(4 * MIB))
    fill(small_disk)
    (small_disk / "room").unlink()
    with deepnvme.Engine(backend=backend) as engine:
        with pytest.raises(OSError, match=r"write of 20971520 bytes at offset 0 \(\d+ bytes free") as caught:
            engine.write(page_aligned(b"y" * 20 * MIB), small_disk / "sparse").result()
        assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(small_disk / "sparse"))
        (small_disk / "sparse").unlink()
        content = pattern(2 * MIB)
        engine.write(page_aligned(content), small_disk / "after").result()
    assert (small_disk / "after").read_bytes() == content


def test_a_write_that_does_not_fit_leaves_its_neighbours_in_the_file(engine: deepnvme.Engine, small_disk: Disk) -> None:
    """Somebody else extends the file while this engine reserves its part and finds the disk full: what is undone is that part,
    and not what the other has written since."""
    theirs, ours = pattern(16 * MIB), page_aligned(bytes(12 * MIB))
    (small_disk / "filler").write_bytes(bytes(small_disk.bytes_free() - 22 * MIB))
    for _ in range(40):
        (small_disk / "file").write_bytes(b"")
        with (small_disk / "file").open("r+b", buffering=0) as file:
            writer = threading.Thread(target=os.pwrite, args=(file.fileno(), theirs, 0))
            writer.start()  # holds the file's lock, and makes it longer bit by bit, for some milliseconds
            with contextlib.suppress(OSError):
                engine.write(ours, small_disk / "file", 16 * MIB).result()
            writer.join()
            length = os.fstat(file.fileno()).st_size
        assert length >= 16 * MIB


def fill(disk: Disk) -> None:
    with (disk / "filler").open("ab", buffering=0) as filler, contextlib.suppress(OSError):
        while True:
            filler.write(bytes(65536))
