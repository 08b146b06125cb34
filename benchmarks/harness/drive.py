"""The drive between two measurements: every contender finds the same files, none of them cached, and a quiet device.

Nothing here is ever timed, and nothing here differs from one contender to the next.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from harness import pattern


class Unsuitable(Exception):
    """This machine cannot be measured as asked; the message says why and what to do."""


@dataclass(frozen=True)
class Filesystem:
    type: str
    device: str


def filesystem_of(path: Path) -> Filesystem:
    """The mount that holds ``path``, as /proc/self/mountinfo has it."""
    resolved = path.resolve()
    best, found = -1, Filesystem("unknown", "unknown")
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, after = line.split(" - ", 1)
        mount_point = Path(before.split()[4].replace("\\040", " "))
        # The last of several mounts on one directory is the one that is seen.
        if resolved.is_relative_to(mount_point) and len(mount_point.parts) >= best:
            best = len(mount_point.parts)
            fs_type, device = after.split()[:2]
            found = Filesystem(fs_type, device)
    return found


def check(directory: Path, nbytes: int) -> None:
    """Raise Unsuitable unless ``directory`` lies on a drive, takes O_DIRECT and has ``nbytes`` free."""
    filesystem = filesystem_of(directory)
    if filesystem.type in ("tmpfs", "ramfs"):
        raise Unsuitable(f"'{directory}' is {filesystem.type}, memory and no drive; give --dir on a drive")
    free = os.statvfs(directory).f_bavail * os.statvfs(directory).f_frsize
    # A nearly full file system allocates in fragments, which no contender is to blame for.
    wanted = nbytes + nbytes // 10
    if free < wanted:
        raise Unsuitable(f"'{directory}' has {free} bytes free, {wanted} are needed; give another --dir or a smaller --size")
    probe = directory / ".direct"
    try:
        os.close(os.open(probe, os.O_CREAT | os.O_WRONLY | os.O_DIRECT))
    except OSError as error:
        raise Unsuitable(
            f"'{directory}' ({filesystem.type}) refuses O_DIRECT: {error.strerror}; give --dir on another file system"
        ) from error
    finally:
        probe.unlink(missing_ok=True)


def lay_out(path: Path, nbytes: int, seed: int, start: int = 0) -> None:
    """Write the file through, so that its blocks are allocated and initialised: overwriting it converts no extent."""
    with path.open("wb", buffering=0) as file:
        os.posix_fallocate(file.fileno(), 0, nbytes)
        for _, chunk in pattern.chunks(seed, start, nbytes):
            file.write(chunk)
        os.fsync(file.fileno())


def holds(path: Path, nbytes: int, seed: int, start: int = 0) -> bool:
    """Whether the file is exactly ``nbytes`` long and reads as the pattern ``seed``."""
    if path.stat().st_size != nbytes:
        return False
    with path.open("rb", buffering=0) as file:
        return all(file.read(len(chunk)) == chunk for _, chunk in pattern.chunks(seed, start, nbytes))


def preallocate(path: Path, nbytes: int) -> None:
    path.unlink(missing_ok=True)
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, nbytes)


def drop_pages(paths: Iterable[Path]) -> None:
    """Write back and forget what the page cache holds of each file that exists."""
    for path in paths:
        with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
            # Only clean pages can be dropped.
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def settle(directory: Path, limit_seconds: float = 2.0) -> None:
    """Commit what is left of unlinks and allocations (a mount with ``discard`` trims now), then wait for a quiet device."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    device = directory.stat().st_dev
    inflight = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}/inflight")
    if not inflight.exists():
        return
    deadline = time.monotonic() + limit_seconds
    quiet = 0
    while quiet < 3 and time.monotonic() < deadline:
        quiet = quiet + 1 if set(inflight.read_text().split()) == {"0"} else 0
        time.sleep(0.005)
