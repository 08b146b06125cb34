"""The kernel's figures about the machine's memory."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

MEMINFO = Path("/proc/meminfo")
NODES = Path("/sys/devices/system/node")


def meminfo(field: str) -> int:
    """Return one line of /proc/meminfo: in bytes if the kernel gives kB, else as a count; 0 if there is no such line.

    If /proc is not mounted, or shows only processes, the lines of the NUMA nodes in /sys are summed. These have no MemAvailable,
    so free memory and cached files are returned for it. Without /sys too, MemAvailable is the free memory, and all other fields
    but MemTotal are 0.
    """
    with contextlib.suppress(OSError):
        return _sum(field, MEMINFO.read_text().splitlines())
    lines = list(_lines_of_nodes())
    if lines:
        parts = ("MemFree", "Active(file)", "Inactive(file)") if field == "MemAvailable" else (field,)
        return sum(_sum(part, lines) for part in parts)
    name = {"MemTotal": "SC_PHYS_PAGES", "MemAvailable": "SC_AVPHYS_PAGES"}.get(field)
    return os.sysconf(name) * os.sysconf("SC_PAGE_SIZE") if name else 0


def _lines_of_nodes() -> Iterator[str]:
    """Yield the lines of each NUMA node's meminfo, in the format of /proc/meminfo."""
    for file in NODES.glob("node*/meminfo"):
        with contextlib.suppress(OSError):
            for line in file.read_text().splitlines():
                yield line.split(maxsplit=2)[2]  # after "Node 0"


def _sum(field: str, lines: list[str]) -> int:
    """Return the sum of a field over all lines that have it."""
    total = 0
    for line in lines:
        name, value = line.split(":", 1)
        if name == field:
            number, *unit = value.split()
            total += int(number) * (1024 if unit else 1)
    return total
