"""Probes of ds_report for a directory: its filesystem, device, free space, and whether direct I/O works there."""

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

from deepnvme.drives.mounts import MEMORY_FILESYSTEMS, Drive, Kind, Mount, block_device, drive_of
from deepnvme.memory.alignment import PAGE
from deepnvme.ops.op_builder import packages
from deepnvme.ops.op_builder.cuda import GdsProbe

from .facts import Fact, human_size

_WITHOUT_FILES = ("proc", "sysfs", "cgroup", "cgroup2", "devpts", "debugfs", "tracefs", "securityfs", "configfs", "mqueue")
_NO_SPACE = (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC))  # Windows has no EDQUOT
_KINDS: dict[Kind, str] = {"nvme": "NVMe", "ssd": "SSD", "rotational": "rotational", "virtual": "virtual drive"}
_GDS_FILESYSTEMS = ("ext4", "xfs")  # on local NVMe; network filesystems that support GDS need software of their vendors


@dataclass(frozen=True)
class DirectIO:
    """Result of trying direct I/O (O_DIRECT) on a new file."""

    works: bool | None
    """Whether direct I/O works; None if that could not be found out."""
    outcome: str
    """Short text of the result for the report, such as "works" or "not tried: ..."."""
    problem: str = ""
    """What is wrong, and what to do; empty if direct I/O works."""
    memory_alignment: int | None = None
    """Bytes to which memory must be aligned; None if unknown."""
    offset_alignment: int | None = None
    """Bytes to which offsets in the file and lengths must be aligned; None if unknown."""


def directory_facts(directory: Path, gds: GdsProbe) -> list[Fact]:
    """Return the report's findings about a directory. Creates one small file there, and removes it.

    Args:
        directory: The directory.
        gds: Whether GPU-direct storage is possible on this machine.

    Raises:
        OSError: If ``directory`` is not a directory, or cannot be entered.
    """
    if not directory.is_dir():
        directory.stat()  # raises the reason if the directory does not exist or cannot be reached
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(directory))
    from .profile_probe import profile_fact  # here, because it takes 0.1 s to import pydantic

    drive = drive_of(directory)
    mount = drive.mount
    block = block_device(directory)
    filesystem = mount.filesystem if mount else "unknown"
    direct = try_direct_io(directory, mount)
    return [
        Fact("path", str(directory.resolve())),
        Fact("filesystem", filesystem, f"{filesystem} on {mount.point} ({mount.options})" if mount else "unknown"),
        Fact("device", mount.source if mount else None, _describe(drive, block)),
        profile_fact(directory, drive, tunable=filesystem not in _WITHOUT_FILES),
        Fact.checked("O_DIRECT", direct.works, direct.outcome, direct.problem, good="OKAY"),
        _alignment("memory alignment", direct.memory_alignment),
        _alignment("offset alignment", direct.offset_alignment),
        *_space(directory),
        _gds_fact(filesystem, block, gds),
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
    if not hasattr(os, "O_DIRECT"):
        return DirectIO(None, "not tried: this system has no O_DIRECT", "this system has no O_DIRECT: use Linux")
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
        return _failed(when, error, directory, mount)
    if direct.works and mount is not None and mount.filesystem in MEMORY_FILESYSTEMS:
        accepts = f"{mount.filesystem} accepts O_DIRECT, but keeps its files in memory, so direct I/O is really buffered"
        problem = f"{accepts}: choose a directory on a drive"
        return dataclasses.replace(direct, works=False, outcome="is really buffered", problem=problem)
    return direct


def _failed(when: str, error: OSError, directory: Path, mount: Mount | None) -> DirectIO:
    """Return the result of a trial that raised ``error``.

    Args:
        when: The step that failed; empty if no file could be created.
        error: The error of that step.
        directory: The directory of the trial.
        mount: The mount that the directory is on; None if unknown.
    """
    if error.errno in _NO_SPACE:
        place = shlex.quote(str(directory))
        look = "quota -s" if error.errno == errno.EDQUOT else f"df -h {place}; df -i {place}"
        return DirectIO(None, "unknown", f"no room for a page to try with ({_name(error)}): make room; what there is: {look}")
    if not when:
        remedy = "choose a directory that you can write"
        if error.errno == errno.EROFS and mount is not None:
            remedy = f"{packages.as_root(f'mount -o remount,rw {shlex.quote(mount.point)}')}, or choose another directory"
        return DirectIO(None, f"not tried: {_name(error)}", f"no file can be made there: {remedy}")
    if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
        problem = f"O_DIRECT is refused {when} with {_name(error)}, transfers are buffered: choose another filesystem"
        return DirectIO(False, "does not work", problem)
    problem = f"the trial failed {when} with {_name(error)}, which is not O_DIRECT's doing: see dmesg or choose another directory"
    return DirectIO(None, "unknown", problem)


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
        with memoryview(memory) as view:
            return DirectIO(True, "works", "", *_tried_alignment(descriptor, view))


def _tried_alignment(descriptor: int, memory: memoryview) -> tuple[int, int]:
    """Return the smallest alignments of memory and of file offset, in bytes, with which the kernel accepts a direct read."""

    def accepted(start: int, offset: int) -> bool:
        """Return whether a direct read at file offset ``offset``, into memory from ``start`` on, succeeds."""
        with memory[start : start + offset] as part:
            try:
                return os.preadv(descriptor, [part], offset % PAGE) > 0
            except OSError:
                return False

    offset = next((size for size in (512, 1024, 2048) if accepted(0, size)), PAGE)
    return next((size for size in (4, 512, 1024, 2048) if accepted(size, offset)), PAGE), offset


def _alignment(name: str, size: int | None) -> Fact:
    text = "unknown" if size is None else f"{size} bytes"
    return Fact(name, size, text, named=f"{name.replace(' ', '_')}_bytes")


def _describe(drive: Drive, block: Path | None) -> str:
    """Return a text that names the mount's source, its disks with their kind and models, and the block sizes."""
    source = drive.mount.source if drive.mount else "unknown"
    if block is None:
        return f"{source}, no block device"
    details = [block.name]
    if drive.disks != (block,):  # RAID, LVM or encryption
        details[0] += f" on {' + '.join(disk.name for disk in drive.disks)}"
    if drive.kind in _KINDS:
        details.append(_KINDS[drive.kind])
    if drive.models != source:  # where the disks have no models
        details.append(drive.models)
    for name, text in (
        ("queue/logical_block_size", "logical block {} bytes"),
        ("queue/physical_block_size", "physical block {} bytes"),
    ):
        with contextlib.suppress(OSError):
            details.append(text.format((block / name).read_text().strip()))
    return f"{source} ({', '.join(details)})"


def _space(directory: Path) -> list[Fact]:
    """Return the facts about free and total space."""
    total, _, free = shutil.disk_usage(directory)
    few = total > 0 and free < 1 << 30  # a filesystem of the kernel's own, such as proc, has size 0
    problem = f"less than 1 GB is free; what takes the space: du -xh --max-depth=2 {shlex.quote(str(directory))}"
    return [
        Fact.checked("free space", free, human_size(free), problem if few else "", "free_bytes"),
        Fact("size", total, human_size(total), named="total_bytes"),
    ]


def _gds_fact(filesystem: str, block: Path | None, gds: GdsProbe) -> Fact:
    """Return whether GPU-direct storage works in the directory, and the first obstacle if not.

    Obstacles of the machine, such as a missing driver, are in other sections of the report.
    """
    problem = ""
    if filesystem not in _GDS_FILESYSTEMS:
        wanted = " or ".join(_GDS_FILESYSTEMS)
        problem = f"{filesystem} is not a filesystem it reaches directly: use {wanted} on a local NVMe drive"
    elif block is None or not block.name.startswith("nvme"):
        name = block.name if block else "the device"
        problem = f"{name} is not a local NVMe drive: choose a directory on one, or go through a pinned CPU tensor"
    elif gds.problems():
        problem = f"the drive would do, but {gds.problems()[0]}"
    possible, text = not problem, "not possible" if problem else "possible"
    return Fact.checked("GPU-direct storage", possible, text, problem, "gpu_direct_storage", good="OKAY", bad="NO")


def _name(error: OSError) -> str:
    """Return the name and text of an error number."""
    # The manual pages call it EOPNOTSUPP; errorcode has only its alias ENOTSUP.
    name = "EOPNOTSUPP" if error.errno == errno.EOPNOTSUPP else errno.errorcode.get(error.errno or 0, error.errno)
    return f"{name} ({error.strerror})"
