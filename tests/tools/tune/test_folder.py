"""The folder that is measured: what it is, whether it can be written to, and that nothing is left in it."""

from __future__ import annotations

import os
import shutil
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from deepnvme.tools.tune import folder
from deepnvme.tools.tune.folder import check_memory, check_space, drop_pages, folder_facts, settle
from deepnvme.tools.tune.workspace import NotMeasurable, remove_abandoned, workspace

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


# -- what killed runs left ---------------------------------------------------------------------------------------------


def killed_run(interpreters: Any, drive: Path) -> Path:
    """Let a process make a temporary directory and kill itself; returns the directory."""
    interpreters.run(f"""
        import signal
        from pathlib import Path
        from deepnvme.tools.tune.workspace import workspace
        with workspace(Path({str(drive)!r}), "ds_io-") as place:
            (place / "tensor").write_bytes(bytes(10_000))
            os.kill(os.getpid(), signal.SIGKILL)
    """)
    (left,) = drive.iterdir()
    return Path(left)


def test_what_a_killed_run_left_is_removed_and_told(interpreters: Any, drive: Path) -> None:
    left = killed_run(interpreters, drive)
    with pytest.warns(RuntimeWarning, match=f"removed '{left}', left behind by a run that was killed"):
        folder_facts(drive)
    assert list(drive.iterdir()) == []


def test_what_a_run_uses_is_left_alone(drive: Path) -> None:
    with workspace(drive, "ds_nvme_tune-") as place:
        (place / "tensor").write_bytes(bytes(10_000))
        folder_facts(drive)
        assert (place / "tensor").exists()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("ds_io-abcdefgh", None),  # somebody's, who likes such names
        ("ds_io-abcdefgh", ""),
        ("ds_io-abcdefgh", "another-machine and-its-start"),  # whose locks are not seen here
        ("ds_io-results", "of this machine"),
        ("backup-of-ds_io-abcdefgh", "of this machine"),
    ],
)
def test_what_is_not_surely_ours_is_left_alone(drive: Path, name: str, content: str | None) -> None:
    place = drive / name
    place.mkdir()
    (place / "thesis").write_text("mine")
    if content is not None:
        (place / "owner").write_text(socket.gethostname() if content == "of this machine" else content)
    remove_abandoned(drive)
    assert (place / "thesis").read_text() == "mine"


def test_a_link_to_what_a_killed_run_left_is_not_followed(interpreters: Any, drive: Path) -> None:
    (drive / "elsewhere").mkdir()
    left = killed_run(interpreters, drive / "elsewhere")
    link = drive / left.name
    link.symlink_to(left)
    remove_abandoned(drive)
    assert link.is_symlink()
    assert (left / "tensor").exists()


def test_a_pipe_in_place_of_the_owners_file_holds_nobody_up(drive: Path) -> None:
    (drive / "ds_io-abcdefgh").mkdir()
    os.mkfifo(drive / "ds_io-abcdefgh" / "owner")
    remove_abandoned(drive)
    assert (drive / "ds_io-abcdefgh").exists()


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
