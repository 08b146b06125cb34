"""Directories in which objects that save memory refuse to be made, or warn that they save none."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import deepnvme
from deepnvme.drives import mounts

from ..support.disks import Disk

MAKERS: dict[str, Callable[[Path], Any]] = {
    "OffloadedOptimizer": lambda path: deepnvme.OffloadedOptimizer(
        [torch.nn.Parameter(torch.ones(3))], torch.optim.SGD, path=path
    ),
    "OffloadedTraining": lambda path: deepnvme.OffloadedTraining(
        torch.nn.Linear(3, 3), torch.optim.SGD, path=path, activations="nvme"
    ),
    "save_on_disk": deepnvme.save_on_disk,
    "Table": lambda path: deepnvme.Table.from_tensor(path, torch.ones(3, 3)),
    "WeightStore": lambda path: deepnvme.streaming.WeightStore.build({"a": torch.ones(3)}, path),
}


@pytest.mark.parametrize("name", MAKERS)
def test_a_directory_in_memory_is_warned_of_once_at_the_callers_line(
    tmpfs: Disk, name: str, recwarn: pytest.WarningsRecorder
) -> None:
    MAKERS[name](tmpfs / "a").close()
    MAKERS[name](tmpfs / "b").close()
    (warning,) = [each for each in recwarn.list if each.category is UserWarning]  # another one says that tmpfs has no direct I/O
    assert "/a' is on tmpfs: this is memory, it saves none" in str(warning.message)
    assert warning.filename == __file__


def test_a_directory_on_a_drive_is_not_warned_of(drive: Path) -> None:
    mounts.warn_of_memory([drive, drive / "missing"])


def test_save_on_disk_in_a_directory_that_cannot_be_written_to_fails_when_it_is_made(interpreters: Any, drive: Path) -> None:
    drive.chmod(0o777)
    (drive / "locked").mkdir(mode=0o555)
    interpreters.run(f"""
import deepnvme, os
make = deepnvme.save_on_disk  # imported with the rights to
if os.geteuid() == 0:
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
for name in ("locked", "locked/new"):
    path = os.path.join({str(drive)!r}, name)
    try:
        make(path)
        raise SystemExit("made")
    except PermissionError as error:
        assert error.filename == path, error
""").check()
    assert os.listdir(drive) == ["locked"]


def test_save_on_disk_leaves_nothing_before_it_is_used(drive: Path) -> None:
    deepnvme.save_on_disk(drive / "new" / "directory")
    assert os.listdir(drive) == []


def test_save_on_disk_in_a_file_fails_when_it_is_made(drive: Path) -> None:
    (drive / "file").touch()
    with pytest.raises(NotADirectoryError) as refused:
        deepnvme.save_on_disk(drive / "file")
    assert refused.value.filename == str(drive / "file")
