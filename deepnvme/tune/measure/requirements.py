"""Checks, before a measurement, whether there is enough space and memory for it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from deepnvme.memory.meminfo import meminfo

from .folder import Unsuitable


def check_space(needs: Iterable[tuple[Path, int]], remedy: str = "give a smaller --io_size or another folder") -> None:
    """Raise Unsuitable if a filesystem has not enough free space for all folders on it.

    Args:
        needs: Pairs of a folder and the bytes needed in it; a folder may come several times.
        remedy: What the user can do, for the message.
    """
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
    """Raise Unsuitable if less than ``nbytes`` of memory is available: the kernel would kill a process.

    Args:
        nbytes: Bytes of host memory needed.
        remedy: What the user can do, for the message.
    """
    available = meminfo("MemAvailable")
    if nbytes > available:
        raise Unsuitable(f"{nbytes} bytes of memory are needed, {available} are available; {remedy}")
