"""Checks folders and memory before a measurement, and prepares files and devices for it.

The checks find out filesystem and device, and whether space and memory suffice. Before each measurement, pages are dropped from
the page cache and the device becomes idle.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from deepnvme.drives.mounts import MEMORY_FILESYSTEMS, mount_of
from deepnvme.memory.system_memory import available_memory
from deepnvme.tools.report import open_descriptor, try_direct_io


class NotMeasurable(Exception):
    """Raised if a measurement is not possible on this machine. The message says why and what to do, in one line."""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type's name if it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


@contextlib.contextmanager
def workspace(folder: Path, prefix: str) -> Iterator[Path]:
    """Create a temporary directory in a folder, yield it, and remove it with its content at the end.

    Args:
        folder: Folder for the directory.
        prefix: Beginning of the directory's name: "ds_nvme_tune-", "ds_io-" or ".deepnvme-".

    Raises:
        NotMeasurable: If the directory cannot be created.
    """
    try:
        directory = tempfile.TemporaryDirectory(prefix=prefix, dir=folder)
    except OSError as error:
        raise NotMeasurable(
            f"'{folder}' cannot be written to: {error.strerror}; choose a directory that you can write"
        ) from error
    try:
        with directory as path:
            yield Path(path)
    finally:
        directory.cleanup()  # again, in case an interrupt came during the first: removing large files takes seconds


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
    """Whether transfers bypass the page cache (direct I/O)."""
    label: str
    """Short text on what a measurement in the folder measures: "ext4, takes direct I/O"; "tmpfs, in memory, not a drive"."""


def folder_facts(folder: Path) -> FolderFacts:
    """Return the facts about a folder.

    Creates small files in the folder and removes them. Raises NotMeasurable if the folder cannot be written to.
    """
    if os.path.exists(folder) and not os.path.isdir(folder):
        raise NotMeasurable(f"'{folder}' is not a directory")
    with workspace(folder, ".deepnvme-"):
        pass  # it can be written to
    mount = mount_of(folder)
    filesystem, device = (mount.filesystem, mount.source) if mount else ("unknown filesystem", "unknown")
    direct = bool(try_direct_io(folder, mount).works)
    kind = "takes direct I/O" if direct else "without direct I/O: the page cache is measured"
    if filesystem in MEMORY_FILESYSTEMS:
        kind = "in memory, not a drive"
    return FolderFacts(str(folder.resolve()), filesystem, device, direct, f"{filesystem}, {kind}")


def check_space(needs: Iterable[tuple[Path, int]], remedy: str = "give a smaller --io_size or another folder") -> None:
    """Raise NotMeasurable if a filesystem has too little free space for all folders on it together.

    Args:
        needs: Pairs of a folder and the bytes needed in it; a folder may occur several times.
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
            raise NotMeasurable(f"'{folder}' has {free} bytes free, {nbytes} are needed; make room, {remedy}")


def check_memory(nbytes: int, remedy: str = "give a smaller --io_size") -> None:
    """Raise NotMeasurable if less than ``nbytes`` of memory is available: the kernel would kill a process.

    Args:
        nbytes: Bytes of host memory needed.
        remedy: What the user can do, for the message.
    """
    available = available_memory()
    if nbytes > available:
        raise NotMeasurable(f"{nbytes} bytes of memory are needed, {available} are available; {remedy}")


def drop_pages(paths: Iterable[Path]) -> None:
    """Write back and drop the page cache's pages of each file; missing files are skipped. Needs no privilege. Blocks."""
    for path in paths:
        with contextlib.suppress(FileNotFoundError), open_descriptor(path, os.O_RDONLY) as descriptor:
            os.fsync(descriptor)  # only clean pages can be dropped
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def sync(path: Path) -> None:
    """Write a file's or directory's data to stable storage (fsync). Blocks."""
    with open_descriptor(path, os.O_RDONLY) as descriptor:
        os.fsync(descriptor)


def settle(directory: Path, limit_seconds: float = 2.0) -> None:
    """Commit pending unlinks and allocations of a directory's filesystem, then wait until its device is idle. Blocks.

    On a mount with ``discard`` the commit makes the device trim. The wait ends after ``limit_seconds`` at most; there is none
    if the kernel does not report the device's requests in flight.
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
