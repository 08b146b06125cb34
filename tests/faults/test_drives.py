"""Several drives under one engine: none stands in the way of another."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import deepnvme

from ..support.faulty_filesystem import FaultyFilesystem
from ..support.memory import page_aligned, pattern
from ..support.patience import PATIENCE, until

Faulty = Callable[..., Any]
BLOCK = 4096


def threads() -> int:
    """Threads of all engines of this process: workers, and those of their backends."""
    count = 0
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            count += Path(f"/proc/self/task/{task}/comm").read_text() == "deepnvme\n"
    return count


@pytest.fixture
def hanging(faulty_disk: FaultyFilesystem) -> FaultyFilesystem:
    """A file system on which writes hang."""
    faulty_disk.fail("write", effect="hang", times=-1)
    return faulty_disk


def test_a_drive_that_hangs_does_not_hold_up_another(hanging: FaultyFilesystem, drive: Path) -> None:
    with deepnvme.Engine("threads", queue_depth=1) as engine:
        stuck = [engine.write(page_aligned(b"x" * BLOCK), hanging / "file") for _ in range(3)]
        content = pattern(100 * BLOCK)
        assert engine.write(page_aligned(content), drive / "file").result(PATIENCE) == len(content)
        assert not any(future.done() for future in stuck)
        hanging.heal()
        assert [future.result() for future in stuck] == [BLOCK] * 3


def test_a_file_that_cannot_be_closed_does_not_hold_up_another_drive(faulty_disk: FaultyFilesystem, drive: Path) -> None:
    """A worker with little to do closes files itself."""
    with deepnvme.Engine("threads", queue_depth=1) as engine:
        faulty_disk.fail("flush", effect="hang", times=-1)
        closing = engine.write(page_aligned(b"x" * BLOCK), faulty_disk / "file")
        for index in range(100):
            assert engine.write(page_aligned(b"x" * BLOCK), drive / str(index)).result(PATIENCE) == BLOCK
        assert not closing.done()
        faulty_disk.resume()
        assert closing.result(PATIENCE) == BLOCK


def test_a_flush_waits_for_writes_of_its_own_drive_only(hanging: FaultyFilesystem, drive: Path) -> None:
    with deepnvme.Engine("threads") as engine:
        stuck = engine.write(page_aligned(b"x" * BLOCK), hanging / "file")
        stuck_flush = engine.fsync(hanging / "file")
        engine.write(page_aligned(b"x" * BLOCK), drive / "file")
        assert engine.fsync(drive / "file").result(PATIENCE) == 0
        assert not stuck.done()
        assert not stuck_flush.done()
        hanging.heal()
        assert stuck_flush.result() == 0
        assert stuck.done()


def test_a_drive_gets_its_workers_with_its_first_transfer(faulty: Faulty, tmp_path: Path, drive: Path) -> None:
    before = threads()
    engine = faulty("threads", num_threads=2, drive_by_folder=True)
    each = threads() - before
    assert each >= 2
    for index, folder in enumerate(["a", "b", "c"]):
        (drive / folder).mkdir()
        for name in ["1", "2"]:
            engine.write(page_aligned(b"x" * BLOCK), drive / folder / name).result()
            assert threads() == before + each * (index + 1)
    engine.close()
    until(lambda: threads() <= before)  # a joined thread may be listed for a moment


def test_a_drive_without_workers_of_its_own_shares_those_of_the_first(faulty: Faulty, drive: Path) -> None:
    engine = faulty("threads", drive_by_folder=True, most_backends=1)
    for folder in ["a", "b"]:
        (drive / folder).mkdir()
        for name in ["1", "2"]:
            assert engine.write(page_aligned(b"x" * BLOCK), drive / folder / name).result() == BLOCK
    (fallback,) = engine.stats()["fallbacks"]
    assert fallback.startswith(f"no workers of its own for the drive of '{drive / 'b' / '1'}': one backend too many")


def test_there_are_workers_for_so_many_drives_only(faulty: Faulty, drive: Path) -> None:
    before = threads()
    engine = faulty("threads", drive_by_folder=True, queue_depth=1)
    each = threads() - before
    for index in range(40):
        (drive / str(index)).mkdir()
        engine.write(page_aligned(b"x" * BLOCK), drive / str(index) / "file").result()
    assert threads() == before + 32 * each
    assert sum("there are 32 already" in reason for reason in engine.stats()["fallbacks"]) == 8
