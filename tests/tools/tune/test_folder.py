"""The folder that is measured: what it is, whether it can be written to, and that nothing is left in it."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from deepnvme.tools.tune import folder
from deepnvme.tools.tune.folder import NotMeasurable, check_memory, check_space, drop_pages, folder_facts, settle, workspace

from ...support.disks import Disk
from ...support.files import cached


def test_a_folder_that_is_missing_is_named(drive: Path) -> None:
    with pytest.raises(NotMeasurable, match=r"/missing' cannot be written to: No such file or directory"):
        folder_facts(drive / "missing")


def test_a_file_is_not_a_folder(drive: Path) -> None:
    (drive / "file").write_bytes(b"mine")
    with pytest.raises(NotMeasurable, match="/file' is not a directory"):
        folder_facts(drive / "file")
    assert (drive / "file").read_bytes() == b"mine"


def test_looking_at_a_folder_leaves_nothing_in_it(drive: Path) -> None:
    facts = folder_facts(drive)
    assert list(drive.iterdir()) == []
    assert Path(facts.path) == drive.resolve()
    assert facts.direct == facts.label.endswith("takes direct I/O")


@pytest.mark.root
def test_memory_is_labelled_as_no_drive(tmpfs: Disk) -> None:
    facts = folder_facts(tmpfs.path)
    assert (facts.filesystem, facts.direct, facts.label) == ("tmpfs", False, "tmpfs, in memory, not a drive")


def test_a_workspace_goes_with_all_that_is_in_it(drive: Path) -> None:
    with pytest.raises(RuntimeError, match="broken"), workspace(drive, "test-") as place:  # noqa: PT012
        assert place.parent == drive
        (place / "deep").mkdir()
        (place / "deep" / "file").write_bytes(bytes(10_000))
        raise RuntimeError("broken")
    assert list(drive.iterdir()) == []


def test_an_interrupt_while_files_are_being_removed_does_not_keep_them(drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, interrupts = shutil.rmtree, [KeyboardInterrupt()]

    def interrupted(*arguments: Any, **more: Any) -> None:
        if interrupts:
            raise interrupts.pop()
        real(*arguments, **more)

    monkeypatch.setattr(shutil, "rmtree", interrupted)
    with pytest.raises(KeyboardInterrupt), workspace(drive, "test-") as place:
        (place / "file").write_bytes(bytes(10_000))
    assert interrupts == []
    assert list(drive.iterdir()) == []


def test_pages_are_dropped_also_where_they_had_not_been_written_back(drive: Path) -> None:
    path = drive / "file"
    path.write_bytes(os.urandom(1 << 20))
    assert cached(path)
    drop_pages([drive / "missing", path])
    assert not cached(path)


def test_settling_ends_although_the_device_never_is_quiet(drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "exists", lambda self: True)
    monkeypatch.setattr(Path, "read_text", lambda self: "       0        7\n")
    begun = time.monotonic()
    settle(drive, limit_seconds=0.05)
    assert time.monotonic() - begun >= 0.05


# -- whether it fits ----------------------------------------------------------------------------------------------------


@pytest.mark.root
def test_folders_of_one_file_system_share_its_space(small_disk: Disk, drive: Path) -> None:
    one, other = small_disk / "one", small_disk / "other"
    one.mkdir()
    other.mkdir()
    free = small_disk.bytes_free() // 2
    facts = os.statvfs(small_disk.path)
    half = facts.f_bavail * facts.f_frsize // 2
    check_space([(one, half), (other, half), (drive, 1)])
    with pytest.raises(NotMeasurable, match=f"bytes free, {2 * (half + 1)} are needed; make room"):
        check_space([(one, half + 1), (drive, 1), (other, half + 1)])
    assert half <= free, "what is reserved for root counts as free"


def test_a_drive_that_is_too_small_is_named_with_the_remedy(drive: Path) -> None:
    with pytest.raises(NotMeasurable, match=rf"'{drive}' has \d+ bytes free, {1 << 60} are needed; make room, or wait$"):
        check_space([(drive, 1 << 60)], "or wait")


def test_all_of_the_memory_is_enough_and_a_byte_more_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder, "available_memory", lambda: 1000)
    check_memory(1000)
    with pytest.raises(NotMeasurable, match=r"^1001 bytes of memory are needed, 1000 are available; give less$"):
        check_memory(1001, "give less")
