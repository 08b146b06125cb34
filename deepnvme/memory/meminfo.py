"""What the kernel says of the machine's memory."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_NODES = Path("/sys/devices/system/node")


def meminfo(field: str) -> int:
    """A line of /proc/meminfo: bytes where the kernel gives kB, else a count; 0 where there is no such line.

    Where /proc is not mounted, or shows processes alone, it is the sum of the NUMA nodes' lines in /sys. They have no
    MemAvailable, for which free memory and cached files stand. Without /sys too, MemAvailable is what is free, and all but
    MemTotal is 0.
    """
    with contextlib.suppress(OSError):
        return _sum(field, _MEMINFO.read_text().splitlines())
    lines = list(_lines_of_nodes())
    if lines:
        parts = ("MemFree", "Active(file)", "Inactive(file)") if field == "MemAvailable" else (field,)
        return sum(_sum(part, lines) for part in parts)
    name = {"MemTotal": "SC_PHYS_PAGES", "MemAvailable": "SC_AVPHYS_PAGES"}.get(field)
    return os.sysconf(name) * os.sysconf("SC_PAGE_SIZE") if name else 0


def _lines_of_nodes() -> Iterator[str]:
    for file in _NODES.glob("node*/meminfo"):
        with contextlib.suppress(OSError):
            for line in file.read_text().splitlines():
                yield line.split(maxsplit=2)[2]  # behind "Node 0"


def _sum(field: str, lines: list[str]) -> int:
    total = 0
    for line in lines:
        name, value = line.split(":", 1)
        if name == field:
            number, *unit = value.split()
            total += int(number) * (1024 if unit else 1)
    return total
