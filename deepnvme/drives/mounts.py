"""Find the drive that a directory is on: its mount, its disks, and the kind of the disks."""

from __future__ import annotations

import functools
import os
import re
import stat
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from deepnvme.files.regular_files import lines_of
from deepnvme.telemetry.callers import stack_level

MEMORY_FILESYSTEMS = ("tmpfs", "ramfs")
"""Filesystems that keep files in memory."""
MOUNTS = Path("/proc/self/mountinfo")
BLOCK_DEVICES = Path("/sys/dev/block")
_VIRTUAL_VENDORS = ("QEMU", "VBOX", "VMware", "Msft")
"""Parts of the vendor or model by which SCSI and SATA disks of QEMU, VirtualBox, VMware and Hyper-V are recognised.
These disks often report that they are rotational, whatever the host has.
"""

Kind = Literal["rotational", "memory", "other"]
"""Kinds of drives that need settings of their own: "rotational" if all disks report it; "memory" for tmpfs and ramfs."""


@dataclass(frozen=True)
class Mount:
    """A mounted filesystem, as /proc/self/mountinfo describes it."""

    point: str
    """Directory on which the filesystem is mounted."""
    filesystem: str
    """Type of the filesystem, such as "ext4"."""
    source: str
    """Device or other source that is mounted."""
    options: str
    """Mount options, separated by commas."""


@dataclass(frozen=True)
class Drive:
    """The mounted file system that has a directory's files, and the disks below it."""

    mount: Mount | None
    """The mounted file system; None if it cannot be determined."""
    disks: tuple[Path, ...]
    """The /sys directories of the disks: several below RAID or LVM, none for a file system that is on no block device."""
    kind: Kind
    """Kind of the drive."""

    @property
    def models(self) -> str:
        """The models of the disks, such as "2 x Samsung SSD 990 PRO 4TB"; if a disk reports none, the source of the mount.

        Models stay the same when the kernel numbers the disks in another order after a restart. Reads /sys.
        """
        models = ["".join(lines_of(disk / "device/model")).strip() for disk in self.disks]
        if not models or not all(models):
            return self.mount.source if self.mount else "unknown"
        counted = {model: models.count(model) for model in sorted(models)}
        return " + ".join(model if count == 1 else f"{count} x {model}" for model, count in counted.items())


def drive_of(path: Path) -> Drive:
    """Return the drive that a file or directory is on, or would be created on if it does not exist yet. Blocks.

    Symbolic links are followed; a link that leads in a circle counts as a missing path. The drives of the last 64
    directories are cached: finding one takes a quarter of a millisecond, or longer if there are many mounts.

    Raises:
        OSError: If the path cannot be reached, for another reason than that it does not exist.
    """
    place = Path(os.path.realpath(path))  # Path.resolve() raises RuntimeError for links that lead in a circle
    while not place.exists() and place != place.parent:
        place = place.parent
    status = place.stat()
    if not stat.S_ISDIR(status.st_mode) and place.parent.stat().st_dev == status.st_dev:
        place = place.parent  # so that the files of a directory are looked up once
    return _look_up(place, status.st_dev, hash(tuple(lines_of(MOUNTS))), MOUNTS, BLOCK_DEVICES)


_warned_of: set[str] = set()
"""Mount points in memory that :func:`warn_of_memory` has warned of."""


def warn_of_memory(paths: Iterable[Path]) -> None:
    """Warn, with UserWarning, if paths are on tmpfs or ramfs, where data that should save memory takes memory.

    Warns once for each file system, since one call of the user may make several objects on it. Raises OSError like
    :func:`drive_of`.
    """
    for path in paths:
        drive = drive_of(path)
        if drive.kind == "memory" and drive.mount is not None and drive.mount.point not in _warned_of:
            _warned_of.add(drive.mount.point)
            warnings.warn(f"'{path}' is on {drive.mount.filesystem}: this is memory, it saves none", stacklevel=stack_level())


@functools.lru_cache(maxsize=64)
def _look_up(place: Path, device: int, mounts_hash: int, mounts: Path, block_devices: Path) -> Drive:
    """Return the drive of an existing directory, or of a file on which a file system is mounted.

    All other arguments are only keys of the cache: the path's device number; the hash of all mounts, since another mount
    may get that number; and the paths where the kernel describes mounts and disks.
    """
    mount = mount_of(place)
    block = block_device(place)
    disks = () if block is None else tuple(sorted(set(_disks_below(block))))
    return Drive(mount, disks, _kind_of(mount, disks))


def mount_of(path: Path) -> Mount | None:
    """Return the mount that a path is on; None if /proc/self/mountinfo cannot be read or does not list it."""
    name = str(path.resolve())
    found = None
    for line in lines_of(MOUNTS):
        left, _, right = line.partition(" - ")
        fields = left.split(" ")  # of blanks the kernel escapes only these: a mount point can have others
        point = unescaped(fields[4])
        inside = name == point or name.startswith(point.rstrip("/") + "/")
        if inside and (found is None or len(point) >= len(found.point)):  # of equal mount points the last covers the others
            filesystem, source, _ = right.split(" ", 2)
            found = Mount(point, filesystem, unescaped(source), fields[5])
    return found


def unescaped(field: str) -> str:
    """Decode the octal escapes that mountinfo uses for blanks and backslashes, such as ``\\040`` for a space."""
    return re.sub(r"\\([0-7]{3})", lambda escape: chr(int(escape[1], 8)), field)


def block_device(path: Path) -> Path | None:
    """Return the /sys directory of the whole disk that holds ``path``; None if the path is on no block device.

    On btrfs, the device number of a subvolume is not that of a block device. There, the disk of the mounted device is
    returned.
    """
    if disk := _disk_numbered(path.stat().st_dev):
        return disk
    mount = mount_of(path)
    return _disk_numbered(os.stat(mount.source).st_rdev) if mount is not None and Path(mount.source).is_block_device() else None


def _disk_numbered(number: int) -> Path | None:
    """Return the /sys directory of the whole disk for a device number; None if it is not the number of a block device."""
    place = (BLOCK_DEVICES / f"{os.major(number)}:{os.minor(number)}").resolve()
    return _disk_of(place) if place.exists() else None


def _disk_of(device: Path) -> Path:
    """Return the /sys directory of the whole disk for that of a partition; a whole disk is returned as it is."""
    return device.parent if (device / "partition").exists() else device


def _disks_below(device: Path) -> Iterator[Path]:
    """Yield the disks below a block device: those under RAID, LVM or dm-crypt, otherwise the device itself."""
    parts = sorted((device / "slaves").glob("*"))
    for part in parts:
        yield from _disks_below(_disk_of(part.resolve()))
    if not parts:
        yield device


def _kind_of(mount: Mount | None, disks: tuple[Path, ...]) -> Kind:
    """Return the kind of a drive."""
    if mount is not None and mount.filesystem in MEMORY_FILESYSTEMS:
        return "memory"
    return "rotational" if disks and all(map(_is_rotational, disks)) else "other"


def _is_rotational(disk: Path) -> bool:
    """Return whether a disk reports that it is rotational. False for a hypervisor's disks, which may all report that."""
    said = " ".join("".join(lines_of(disk / "device" / name)) for name in ("vendor", "model"))
    virtual = disk.name.startswith(("vd", "xvd")) or any(vendor in said for vendor in _VIRTUAL_VENDORS)
    return not virtual and "".join(lines_of(disk / "queue/rotational")).strip() == "1"
