"""The drive that a path is on, as the kernel's files describe it: here by files in their place, and for real."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from deepnvme.drives import mounts as drives
from deepnvme.drives.mounts import drive_of, mount_of

from ..support.disks import Disk


@dataclass
class Kernel:
    """Directories in place of /sys and a file in place of /proc/self/mountinfo."""

    directory: Path

    def disk(self, name: str, rotational: str = "0", model: str = "", parts: tuple[Path, ...] = ()) -> Path:
        """A block device; one of RAID, LVM or encryption has parts."""
        place = self.directory / "block" / name
        (place / "queue").mkdir(parents=True)
        (place / "queue/rotational").write_text(f"{rotational}\n")
        (place / "slaves").mkdir()
        if model:
            (place / "device").mkdir()
            (place / "device/model").write_text(f"{model}   \n")
        for part in parts:
            (place / "slaves" / part.name).symlink_to(part)
        return place

    def partition(self, disk: Path, number: int) -> Path:
        place = disk / f"{disk.name}p{number}"
        place.mkdir()
        (place / "partition").write_text(f"{number}\n")
        return place

    def holds(self, path: Path, device: Path, filesystem: str = "ext4") -> None:
        """Let the device be the one that a path is on."""
        number = path.stat().st_dev
        link = self.directory / "numbers" / f"{os.major(number)}:{os.minor(number)}"
        link.parent.mkdir(exist_ok=True)
        link.symlink_to(device)
        self.mount(path, filesystem, f"/dev/{device.name}")

    def mount(self, path: Path, filesystem: str, source: str) -> None:
        shown = str(path).replace(" ", "\\040")
        with (self.directory / "mountinfo").open("a", newline="") as file:
            file.write(f"31 23 0:28 / {shown} rw,relatime shared:9 - {filesystem} {source} rw\n")


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kernel:
    place = tmp_path / "kernel"
    place.mkdir()
    monkeypatch.setattr(drives, "MOUNTS", place / "mountinfo")
    monkeypatch.setattr(drives, "BLOCK_DEVICES", place / "numbers")
    return Kernel(place)


@contextlib.contextmanager
def mounted_in_memory(place: Path, source: str) -> Iterator[None]:
    """A tmpfs; the kernel gives the number of one that was unmounted to the next."""
    mounting = ["mount", "-t", "tmpfs", source, str(place)]
    if os.geteuid() != 0 or subprocess.run(mounting, capture_output=True).returncode != 0:
        pytest.skip("needs root, and to be allowed to mount")
    try:
        yield
    finally:
        subprocess.run(["umount", str(place)], check=True)


@pytest.mark.parametrize(
    ("name", "rotational", "kind"),
    [
        ("nvme0n1", "0", "other"),
        ("sda", "1", "rotational"),
        ("vda", "1", "other"),  # virtio says so of every drive that does not tell
        ("sda", "", "other"),
    ],
)
def test_the_kind_of_a_disk_is_seen_by_its_name_and_what_it_says(
    kernel: Kernel, tmp_path: Path, name: str, rotational: str, kind: str
) -> None:
    kernel.holds(tmp_path, kernel.disk(name, rotational))
    assert drive_of(tmp_path).kind == kind


@pytest.mark.parametrize(
    ("vendor", "model"),
    [("Msft", "Virtual Disk"), ("VMware", "Virtual disk"), ("ATA", "QEMU HARDDISK"), ("ATA", "VBOX HARDDISK")],
)
def test_a_scsi_disk_of_a_virtual_machine_is_not_taken_for_a_rotational_one(
    kernel: Kernel, tmp_path: Path, vendor: str, model: str
) -> None:
    disk = kernel.disk("sda", "1", model)
    (disk / "device/vendor").write_text(f"{vendor}    \n")
    kernel.holds(tmp_path, disk)
    assert drive_of(tmp_path).kind == "other"


def test_a_raid_of_partitions_below_a_volume_is_its_disks(kernel: Kernel, tmp_path: Path) -> None:
    disks = [kernel.disk(f"nvme{number}n1", model="Fast 4TB") for number in range(4)]
    raid = kernel.disk("md0", parts=tuple(kernel.partition(disk, 1) for disk in disks))
    kernel.holds(tmp_path, kernel.disk("dm-0", parts=(raid,)))
    drive = drive_of(tmp_path)
    assert (drive.kind, drive.disks, drive.models) == ("other", tuple(disks), "4 x Fast 4TB")


def test_a_raid_is_rotational_only_if_all_its_disks_are(kernel: Kernel, tmp_path: Path) -> None:
    mixed = kernel.disk("md0", parts=(kernel.disk("nvme0n1", model="Fast"), kernel.disk("sda", "1", model="Large")))
    kernel.holds(tmp_path, mixed)
    drive = drive_of(tmp_path)
    assert (drive.kind, drive.models) == ("other", "Fast + Large")


def test_files_in_memory_are_on_no_disk(kernel: Kernel, tmp_path: Path) -> None:
    kernel.mount(tmp_path, "tmpfs", "tmpfs")
    drive = drive_of(tmp_path)
    assert (drive.kind, drive.disks, drive.models) == ("memory", (), "tmpfs")


def test_without_a_block_device_the_source_is_the_name(kernel: Kernel, tmp_path: Path) -> None:
    kernel.mount(tmp_path, "nfs4", "server:/export")
    drive = drive_of(tmp_path)
    assert (drive.kind, drive.disks, drive.models) == ("other", (), "server:/export")


def test_of_a_machine_that_shows_nothing_the_mount_is_unknown(kernel: Kernel, tmp_path: Path) -> None:
    drive = drive_of(tmp_path)
    assert (drive.mount, drive.kind, drive.models) == (None, "other", "unknown")


def test_what_does_not_exist_yet_is_on_the_drive_that_it_would_be_made_on(kernel: Kernel, tmp_path: Path) -> None:
    kernel.holds(tmp_path, kernel.disk("nvme0n1"))
    assert drive_of(tmp_path / "not" / "there" / "file.pt") == drive_of(tmp_path)


def test_a_symbolic_link_is_on_the_drive_that_it_leads_to_even_to_what_does_not_exist_yet(kernel: Kernel, tmp_path: Path) -> None:
    kernel.holds(tmp_path, kernel.disk("nvme0n1"))
    kernel.mount(tmp_path / "kernel", "ext4", "another")
    link = tmp_path / "link.pt"
    link.symlink_to(kernel.directory / "file.pt")
    mount = drive_of(link).mount
    assert mount is not None
    assert mount.source == "another"


def test_the_files_of_a_directory_are_looked_up_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked_up: list[Path] = []
    real = drives.mount_of

    def recording(path: Path) -> drives.Mount | None:
        looked_up.append(path)
        return real(path)

    monkeypatch.setattr(drives, "mount_of", recording)
    for number in range(100):
        (tmp_path / f"{number}").touch()
        drive_of(tmp_path / f"{number}")
    assert set(looked_up) == {tmp_path}


def test_what_is_mounted_over_a_directory_is_noticed(small_disk: Disk, drive: Path) -> None:
    place = drive / "mounted over"
    place.mkdir()
    before = drive_of(place)
    subprocess.run(["mount", "--bind", str(small_disk.path), str(place)], check=True)
    try:
        over = drive_of(place)
    finally:
        subprocess.run(["umount", str(place)], check=True)
    assert over.mount is not None
    assert over.mount.point == str(place.resolve())
    assert drive_of(place) == before


def test_a_file_system_that_gets_the_device_number_of_another_is_told_apart(drive: Path) -> None:
    place = drive / "mounted over"
    place.mkdir()
    found = []
    for source in ("one", "two"):
        with mounted_in_memory(place, source):
            mount = drive_of(place).mount
            found.append(mount and mount.source)
    assert found == ["one", "two"]


def test_the_innermost_mount_is_the_one_and_of_equal_ones_the_last(kernel: Kernel, tmp_path: Path) -> None:
    inner = tmp_path / "a drive"
    inner.mkdir()
    for path, source in ((tmp_path, "outer"), (inner, "covered"), (inner, "inner")):
        kernel.mount(path, "ext4", source)
    found = mount_of(inner)
    assert found is not None
    assert (found.point, found.source) == (str(inner), "inner")
    assert mount_of(tmp_path / "elsewhere") != found


@pytest.mark.parametrize("blank", ["\u00a0", "\u2028", "\x85", "\f", "\r"])
def test_a_mount_point_may_have_blanks_that_the_kernel_does_not_escape(kernel: Kernel, tmp_path: Path, blank: str) -> None:
    point = tmp_path / f"a{blank}drive"
    point.mkdir()
    for path in (tmp_path, point):
        kernel.mount(path, "ext4", path.name)
    found = mount_of(point / "file")
    assert found is not None
    assert (found.point, found.filesystem, found.options) == (str(point), "ext4", "rw,relatime")
