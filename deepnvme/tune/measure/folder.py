"""What a measurement needs of a folder and this machine: it examines them, and checks that space and memory suffice.

It also makes a temporary directory in the folder, and brings files and device into a defined state.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import socket
import tempfile
import time
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from deepnvme.drives import MEMORY_FILESYSTEMS, block_device, mount_of
from deepnvme.memory.system_memory import meminfo
from deepnvme.report import directory_probes


class Unsuitable(Exception):
    """Raised if a measurement is not possible on this machine. The message says why and what to do, in one line."""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type's name if it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


@dataclass(frozen=True)
class FolderFacts:
    """The filesystem and device that a folder is on."""

    path: str
    """Absolute path of the folder."""
    filesystem: str
    """Type of the filesystem, such as "ext4"."""
    device: str
    """Device or other source of the mount."""
    direct: bool
    """Whether transfers bypass the page cache."""
    label: str
    """What a measurement there measures: "ext4, takes direct I/O"; "tmpfs, in memory, not a drive"."""
    device_number: int
    """Number of the whole disk that the folder is on: equal for folders on one disk, whatever their partitions, mounts and btrfs
    subvolumes. ``st_dev`` where no disk is known; volumes of LVM and the like count as disks of their own."""


def folder_facts(folder: Path) -> FolderFacts:
    """Return the facts about a folder, after removing what killed runs have left in it (:func:`remove_abandoned`).

    Makes small files in it and removes them. Raises Unsuitable if it cannot be written to.
    """
    if os.path.exists(folder) and not os.path.isdir(folder):
        raise Unsuitable(f"'{folder}' is not a directory")
    with workspace(folder, ".deepnvme-"):
        pass  # it can be written to
    remove_abandoned(folder)
    mount = mount_of(folder)
    filesystem = mount.filesystem if mount else "unknown filesystem"
    direct = directory_probes.try_direct_io(folder, mount)
    in_memory = filesystem in MEMORY_FILESYSTEMS
    label = f"{filesystem}, in memory, not a drive" if in_memory else f"{filesystem}, takes direct I/O"
    if not in_memory and not direct.works:
        label = f"{filesystem}, without direct I/O: the page cache is measured"
    return FolderFacts(
        path=str(folder.resolve()),
        filesystem=filesystem,
        device=mount.source if mount else "unknown",
        direct=bool(direct.works),
        label=label,
        device_number=_disk_number(folder),
    )


def check_space(needs: Iterable[tuple[Path, int]], remedy: str = "give a smaller --io_size or another folder") -> None:
    """Raise Unsuitable if a filesystem has not enough free space for all folders on it.

    Args:
        needs: Pairs of a folder and the bytes needed in it; a folder may come several times.
        remedy: What the user can do, for the message.
    """
    wanted: dict[int, tuple[Path, int]] = {}
    for folder, nbytes in needs:
        device = folder.stat().st_dev
        first, before = wanted.get(device, (folder, 0))
        wanted[device] = first, before + nbytes
    for folder, nbytes in wanted.values():
        free = shutil.disk_usage(folder).free
        if free < nbytes:
            raise Unsuitable(f"'{folder}' has {free} bytes free, {nbytes} are needed; make room, {remedy}")


def check_memory(nbytes: int, remedy: str = "give a smaller --io_size") -> None:
    """Raise Unsuitable if less than ``nbytes`` of memory is available: the kernel would kill a process.

    Args:
        nbytes: Bytes of host memory needed.
        remedy: What the user can do, for the message.
    """
    available = meminfo("MemAvailable")
    if nbytes > available:
        raise Unsuitable(f"{nbytes} bytes of memory are needed, {available} are available; {remedy}")


def _disk_number(folder: Path) -> int:
    """Return the number of the whole disk that a folder is on; ``st_dev`` if it is on none."""
    disk = block_device(folder)
    if disk is None:
        return folder.stat().st_dev
    major, minor = (disk / "dev").read_text().split(":")
    return os.makedev(int(major), int(minor))


@contextlib.contextmanager
def workspace(folder: Path, prefix: str) -> Iterator[Path]:
    """Make a temporary directory in a folder, and remove it with its content at the end.

    If the process is killed before that, the next :func:`remove_abandoned` in the folder removes it.

    Args:
        folder: Where to make it.
        prefix: Beginning of its name, one of :data:`PREFIXES`.

    Raises:
        Unsuitable: If it cannot be made.
    """
    try:
        directory = tempfile.TemporaryDirectory(prefix=prefix, dir=folder)
    except OSError as error:
        raise Unsuitable(f"'{folder}' cannot be written to: {error.strerror}; choose a directory that you can write") from error
    try:
        with directory as path, _owned(Path(path)):
            yield Path(path)
    finally:
        directory.cleanup()  # again, in case an interrupt came during the first: removing large files takes seconds


PREFIXES = ("ds_nvme_tune-", "ds_io-", ".deepnvme-")
"""Beginnings of the names of temporary directories."""
_NAME = re.compile(rf"({'|'.join(map(re.escape, PREFIXES))})[a-z0-9_]{{8}}")  # what tempfile adds to them
_OWNER = "owner.json"
_BOOT = Path("/proc/sys/kernel/random/boot_id")


@contextlib.contextmanager
def _owned(directory: Path) -> Iterator[None]:
    """Keep a locked file in a directory that says whose it is. The kernel removes the lock when this process ends, however."""
    new = directory / f"{_OWNER}.new"
    descriptor = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        # On a full disk, or one without locks, the directory is never taken for an abandoned one.
        with contextlib.suppress(OSError):
            os.write(descriptor, json.dumps({**_this_machine(), "pid": os.getpid()}).encode())
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.rename(new, directory / _OWNER)  # so that whoever sees the file finds it locked
        yield
    finally:
        os.close(descriptor)


def _this_machine() -> dict[str, str]:
    """Return what tells this machine from others: its name, and which of its starts this is."""
    with contextlib.suppress(OSError):
        return {"host": socket.gethostname(), "boot": _BOOT.read_text().strip()}
    return {"host": socket.gethostname()}


def remove_abandoned(folder: Path) -> None:
    """Remove temporary directories of runs on this machine that were killed, and warn of each (RuntimeWarning).

    What cannot be removed is left.

    Args:
        folder: Where runs made them.
    """
    with contextlib.suppress(PermissionError):  # of a folder that can be written to, but not be listed
        for path in sorted(folder.iterdir()):
            with contextlib.suppress(OSError, ValueError):
                if _remove_if_abandoned(path):
                    warnings.warn(f"removed '{path}', left behind by a run that was killed", RuntimeWarning, stacklevel=2)


def _remove_if_abandoned(path: Path) -> bool:
    """Remove a directory if it surely is one of ours that nobody uses any more, and return whether it was removed.

    That is a directory of this user with such a name, in which the file that :func:`workspace` makes is of this machine and not
    locked by any process.

    Raises:
        OSError: If it is in use, or cannot be removed.
        ValueError: If the file has another content.
    """
    if not _NAME.fullmatch(path.name) or path.is_symlink() or not path.is_dir() or path.stat().st_uid != os.geteuid():
        return False
    descriptor = os.open(path / _OWNER, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        owner, here = json.loads(os.read(descriptor, 4096)), _this_machine()
        # Other machines' locks are not seen on every network file system. In a container, only the start tells the machine.
        if not isinstance(owner, dict) or all(owner.get(name) != here[name] for name in here):
            return False
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path)
    finally:
        os.close(descriptor)
    return True


def drop_pages(paths: Iterable[Path]) -> None:
    """Write back and drop the page cache's pages of each file; missing files are skipped. Needs no privilege. Blocks."""
    for path in paths:
        with contextlib.suppress(FileNotFoundError), directory_probes.open_descriptor(path, os.O_RDONLY) as descriptor:
            os.fsync(descriptor)  # only clean pages can be dropped
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def sync(path: Path) -> None:
    """Write a file's or directory's data to stable storage (fsync). Blocks."""
    with directory_probes.open_descriptor(path, os.O_RDONLY) as descriptor:
        os.fsync(descriptor)


def settle(directory: Path, limit_seconds: float = 2.0) -> None:
    """Wait until a directory's device is idle, after committing pending unlinks and allocations.

    On a mount with ``discard`` the commit makes the device trim. Blocks, for ``limit_seconds`` at most after the commit; only for
    the commit if the device does not tell its requests in flight.
    """
    sync(directory)
    device = directory.stat().st_dev
    inflight = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}/inflight")
    if not inflight.exists():
        return
    deadline = time.monotonic() + limit_seconds
    quiet = 0
    while quiet < 3 and time.monotonic() < deadline:
        quiet = quiet + 1 if set(inflight.read_text().split()) == {"0"} else 0
        time.sleep(0.005)
