"""Whether it fits is told before it is tried, with what to do about it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from deepnvme.tools.tune.measure import folder
from deepnvme.tools.tune.measure.folder import check_memory, check_space
from deepnvme.tools.tune.measure.unsuitable import Unsuitable

from ...support.disks import Disk


@pytest.mark.root
def test_folders_of_one_file_system_share_its_space(small_disk: Disk, drive: Path) -> None:
    one, other = small_disk / "one", small_disk / "other"
    one.mkdir()
    other.mkdir()
    free = small_disk.bytes_free() // 2
    facts = os.statvfs(small_disk.path)
    half = facts.f_bavail * facts.f_frsize // 2
    check_space([(one, half), (other, half), (drive, 1)])
    with pytest.raises(Unsuitable, match=f"bytes free, {2 * (half + 1)} are needed; make room"):
        check_space([(one, half + 1), (drive, 1), (other, half + 1)])
    assert half <= free, "what is reserved for root counts as free"


def test_a_drive_that_is_too_small_is_named_with_the_remedy(drive: Path) -> None:
    with pytest.raises(Unsuitable, match=rf"'{drive}' has \d+ bytes free, {1 << 60} are needed; make room, or wait$"):
        check_space([(drive, 1 << 60)], "or wait")


def test_all_of_the_memory_is_enough_and_a_byte_more_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder, "meminfo", {"MemAvailable": 1000}.get)
    check_memory(1000)
    with pytest.raises(Unsuitable, match=r"^1001 bytes of memory are needed, 1000 are available; give less$"):
        check_memory(1001, "give less")
