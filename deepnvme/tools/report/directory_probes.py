"""Probes of ds_report for a directory: its filesystem, device, drive profile, free space, and whether direct I/O works there."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import mmap
import os
import shlex
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from deepnvme.drives.mounts import MEMORY_FILESYSTEMS, Drive, Mount, drive_of
from deepnvme.memory.alignment import PAGE
from deepnvme.telemetry.descriptions import size_for_people

from .facts import Fact

_WITHOUT_FILES = ("proc", "sysfs", "cgroup", "cgroup2", "devpts", "debugfs", "tracefs", "securityfs", "configfs", "mqueue")


@dataclass(frozen=True)
class DirectIO:
    """Result of trying direct I/O (O_DIRECT) on a new file."""

    works: bool | None
    """Whether direct I/O works; None if that could not be found out."""
    outcome: str
    """Short text of the result for the report, such as "works" or "not tried: ..."."""
    problem: str = ""
    """What is wrong, and what to do; empty if direct I/O works."""


def directory_facts(directory: Path) -> list[Fact]:
    """Return the report's findings about a directory. Creates one small file there, and removes it.

    Raises:
        OSError: If ``directory`` is not a directory, or cannot be entered.
    """
    if not directory.is_dir():
        directory.stat()  # raises the reason if the directory does not exist or cannot be reached
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(directory))
    drive = drive_of(directory)
    mount = drive.mount
    filesystem = mount.filesystem if mount else "unknown"
    direct = try_direct_io(directory, mount)
    return [
        Fact("path", str(directory.resolve())),
        Fact("filesystem", filesystem, f"{filesystem} on {mount.point} ({mount.options})" if mount else "unknown"),
        Fact("device", mount.source if mount else None, _describe(drive)),
        _profile(directory, drive),
        Fact.checked("O_DIRECT", direct.works, direct.outcome, direct.problem, good="OKAY"),
        _space(directory),
    ]


@contextlib.contextmanager
def open_descriptor(path: str | os.PathLike[str], flags: int) -> Iterator[int]:
    """Open a file, yield its descriptor, and close it at the end of the ``with`` block.

    Used instead of a file object where ``os.open`` flags are needed, and because an interrupt just before the ``with`` block
    then gives no warning.
    """
    descriptor = os.open(path, flags | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def try_direct_io(directory: Path, mount: Mount | None = None) -> DirectIO:
    """Try direct I/O: write and read a page of a new file in a directory with O_DIRECT, and remove the file.

    Never raises OSError: the result says what failed.

    Args:
        directory: Where the file is made.
        mount: The mount that the directory is on, for better explanations; None if unknown.
    """
    if mount is not None and mount.filesystem in _WITHOUT_FILES:
        outcome = f"not tried: {mount.filesystem} holds no files to store in"
        return DirectIO(None, outcome, f"{mount.filesystem} is the kernel's: choose a directory on a drive")
    when = ""
    try:
        descriptor, name = tempfile.mkstemp(prefix=".deepnvme-report-", dir=directory)
        try:
            os.close(descriptor)
            when = "at open"
            with open_descriptor(name, os.O_RDWR | os.O_DIRECT) as descriptor:
                when = "at the first transfer"
                direct = _transfer(descriptor)
        finally:
            with contextlib.suppress(OSError):
                os.unlink(name)
    except OSError as error:
        return _failed(when, error)
    if direct.works and mount is not None and mount.filesystem in MEMORY_FILESYSTEMS:
        accepts = f"{mount.filesystem} accepts O_DIRECT, but keeps its files in memory, so direct I/O is really buffered"
        problem = f"{accepts}: choose a directory on a drive"
        return dataclasses.replace(direct, works=False, outcome="is really buffered", problem=problem)
    return direct


def _failed(when: str, error: OSError) -> DirectIO:
    """Return the result of a trial that raised ``error`` in the step ``when``; empty if no file could be created."""
    name = f"{errno.errorcode.get(error.errno or 0, error.errno)} ({error.strerror})"
    if when and error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
        problem = f"O_DIRECT is refused {when} with {name}, transfers are buffered: choose another filesystem"
        return DirectIO(False, "does not work", problem)
    return DirectIO(None, f"unknown: {name}", "no page could be written there: choose a directory that you can write, with room")


def _transfer(descriptor: int) -> DirectIO:
    """Write a page and read it back through a descriptor opened with O_DIRECT, and return the result."""
    with mmap.mmap(-1, 2 * PAGE) as memory:  # page-aligned, as direct I/O needs it; bytes objects are not
        memory[:PAGE] = os.urandom(PAGE)
        with memoryview(memory) as view, view[:PAGE] as first, view[PAGE:] as second:
            written = os.pwrite(descriptor, first, 0)
            got = os.preadv(descriptor, [second], 0)
        if written != PAGE or got != PAGE or memory[:PAGE] != memory[PAGE:]:
            problem = f"direct I/O moved {written} and {got} bytes of {PAGE}, or other ones: do not use this filesystem"
            return DirectIO(False, "does not work", problem)
        return DirectIO(True, "works")


def _profile(directory: Path, drive: Drive) -> Fact:
    """Return the report's line about the engine settings for a directory: those of its drive's profile, or the defaults.

    Its value is the path of the profile's file, or None if the default settings apply.
    """
    # here, because it takes 0.1 s to import pydantic
    from deepnvme.drives.profiles import default_settings, profile_of, profile_path

    try:
        if settings := profile_of(drive):
            return Fact("drive profile", str(profile_path(drive)), f"{settings} ({profile_path(drive)})")
    except ValueError as error:  # says what to do
        return Fact.checked("drive profile", None, "not usable", str(error))
    tune = f"to find the best settings: ds_nvme_tune --nvme_dir {shlex.quote(str(directory))} --save_profile"
    problems = () if drive.kind == "memory" or drive.mount is None else (tune,)
    return Fact("drive profile", None, f"none: the default, {default_settings(drive)}", problems=problems)


def _describe(drive: Drive) -> str:
    """Return a text that names the mount's source, and its disks with their kind and models."""
    source = drive.mount.source if drive.mount else "unknown"
    if not drive.disks:
        return f"{source}, no block device"
    details = [" + ".join(disk.name for disk in drive.disks)]
    if drive.kind == "rotational":
        details.append("rotational")
    if drive.models != source:  # where the disks have no models
        details.append(drive.models)
    return f"{source} ({', '.join(details)})"


def _space(directory: Path) -> Fact:
    """Return the free space. Little of it is a problem."""
    total, _, free = shutil.disk_usage(directory)
    few = total > 0 and free < 1 << 30  # a filesystem of the kernel's own, such as proc, has size 0
    text = f"{size_for_people(free)} of {size_for_people(total)}"
    return Fact.checked("free space", free, text, "less than 1 GiB is free: make room" if few else "", "free_bytes")
