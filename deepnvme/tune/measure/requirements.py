"""Whether what is to be measured fits: on the drives, and in memory."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from deepnvme.memory.meminfo import meminfo

from .folder import Unsuitable


def check_space(needs: Iterable[tuple[Path, int]], remedy: str = "give a smaller --io_size or another folder") -> None:
    """``needs``: bytes wanted in each folder. Raises Unsuitable if a filesystem has not that much free for all its folders."""
    wanted: dict[int, int] = {}
    folders: dict[int, Path] = {}
    for folder, nbytes in needs:
        device = folder.stat().st_dev
        wanted[device] = wanted.get(device, 0) + nbytes
        folders.setdefault(device, folder)
    for device, nbytes in wanted.items():
        status = os.statvfs(folders[device])
        free = status.f_bavail * status.f_frsize
        if free < nbytes:
            raise Unsuitable(f"'{folders[device]}' has {free} bytes free, {nbytes} are needed; make room, {remedy}")


def check_memory(nbytes: int, remedy: str = "give a smaller --io_size") -> None:
    """Raise Unsuitable unless so much memory is available: with less, the kernel would kill a process."""
    available = meminfo("MemAvailable")
    if nbytes > available:
        raise Unsuitable(f"{nbytes} bytes of memory are needed, {available} are available; {remedy}")
