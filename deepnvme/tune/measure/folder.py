"""The folder that is measured: whether it can be, what lies under it, and the state its files are in before each transfer."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from deepnvme.report import directory as _directory


class Unsuitable(Exception):
    """What was asked for cannot be measured here; the message says why and what to do, in one line."""


@dataclass(frozen=True)
class FolderFacts:
    """Where a folder lies."""

    path: str
    filesystem: str
    device: str
    direct: bool
    """Whether transfers bypass the page cache."""
    label: str
    """What figures from here are figures of: "ext4, takes direct I/O"; "tmpfs, in memory, not a drive"."""
    device_number: int


def examine(folder: Path) -> FolderFacts:
    """Look at ``folder``, making and removing one small file in it. Raises Unsuitable if it cannot be written to."""
    try:
        if not folder.is_dir():
            folder.stat()
            raise Unsuitable(f"'{folder}' is not a directory")
        descriptor, name = tempfile.mkstemp(prefix=".deepnvme-", dir=folder)
        os.close(descriptor)
        os.unlink(name)
    except OSError as error:
        raise Unsuitable(f"'{folder}' cannot be written to: {error.strerror}; choose a directory that you can write") from error
    mount = _directory.mount_of(folder)
    filesystem = mount.filesystem if mount else "unknown filesystem"
    direct = _directory.try_direct_io(folder, mount)
    in_memory = filesystem in _directory.IN_MEMORY
    label = f"{filesystem}, in memory, not a drive" if in_memory else f"{filesystem}, takes direct I/O"
    if not in_memory and not direct.works:
        label = f"{filesystem}, without direct I/O: the page cache is measured"
    return FolderFacts(
        path=str(folder.resolve()),
        filesystem=filesystem,
        device=mount.source if mount else "unknown",
        direct=bool(direct.works) and not in_memory,
        label=label,
        device_number=folder.stat().st_dev,
    )


@contextlib.contextmanager
def workspace(folder: Path, prefix: str) -> Iterator[Path]:
    """A directory of one's own in ``folder``, removed with all that it holds. Raises Unsuitable if it cannot be made."""
    try:
        directory = tempfile.TemporaryDirectory(prefix=prefix, dir=folder)
    except OSError as error:
        raise Unsuitable(f"'{folder}' cannot be written to: {error.strerror}; choose a directory that you can write") from error
    try:
        with directory as path:
            yield Path(path)
    finally:
        directory.cleanup()  # once more, for when an interrupt came into the first: to remove large files takes seconds


def drop_pages(paths: Iterable[Path]) -> None:
    """Write back and forget what the page cache holds of each file that exists. Needs no privilege."""
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            # No file object: an interrupt between its making and its ``with`` would have it complain when it goes.
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(descriptor)  # only clean pages can be dropped
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


def sync(path: Path) -> None:
    """Have a file's or a directory's data on stable storage."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def settle(directory: Path, limit_seconds: float = 2.0) -> None:
    """Commit what is left of unlinks and allocations (a mount with ``discard`` trims now), then wait for a quiet device."""
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
