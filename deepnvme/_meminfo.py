"""What /proc/meminfo says."""

from __future__ import annotations

from pathlib import Path


def meminfo(field: str) -> int:
    """A line of /proc/meminfo: bytes where the kernel gives kB, else a count; 0 where there is no such line."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, value = line.split(":", 1)
        if name == field:
            number, *unit = value.split()
            return int(number) * (1024 if unit else 1)
    return 0
