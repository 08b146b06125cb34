"""Memory that can be used: what this process may still take, within what the machine has free and its control groups allow."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from deepnvme.drives.mounts import unescaped
from deepnvme.files.regular_files import lines_of

MEMINFO = Path("/proc/meminfo")
NODES = Path("/sys/devices/system/node")
PROCESS = Path("/proc/self")
CONTROL_GROUPS = Path("/sys/fs/cgroup")


def available_memory() -> int:
    """Return how many bytes of memory this process can still use.

    This is the least of what the machine and each of the process's control groups have left. Memory that the kernel reclaims when
    it is needed, such as cached file pages, counts as available.
    """
    limited = [left for left in map(_left_in, _memory_groups(PROCESS)) if left is not None]
    return min([meminfo("MemAvailable"), *limited])


def _memory_groups(process: Path) -> Iterator[Path]:
    """Yield the directories of the control groups that limit the process's memory: its own first, then the enclosing ones."""
    memberships: dict[str, str] = {}
    for line in lines_of(process / "cgroup"):
        _, controllers, name = line.split(":", 2)
        memberships[controllers] = name  # version 2 of control groups lists no controllers
    mounts = lines_of(process / "mountinfo")
    if not mounts:  # /proc is missing; in a container, the process's own group is mounted at the usual path
        yield from (CONTROL_GROUPS, CONTROL_GROUPS / "memory")
    for line in mounts:
        before, _, after = line.partition(" - ")
        root, mount_point = map(unescaped, before.split()[3:5])
        filesystem, _, options = after.split(maxsplit=2)
        if filesystem == "cgroup2":
            group = memberships.get("")
        elif filesystem == "cgroup" and "memory" in options.split(","):
            group = next((name for controllers, name in memberships.items() if "memory" in controllers.split(",")), None)
        else:
            continue
        if group is None:
            continue
        # In a container, the root of the mount may be the process's own group, so that the groups above it are not visible.
        inside = Path(group).relative_to(root) if Path(group).is_relative_to(root) else Path()
        directory = Path(mount_point, inside)
        yield directory
        yield from directory.parents[: len(inside.parts)]


def _left_in(group: Path) -> int | None:
    """Return how many bytes can still be used in a control group of either version, or None if it has no limit."""
    for limit_name, usage_name, cached_names in (
        ("memory.max", "memory.current", ("active_file", "inactive_file")),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_active_file", "total_inactive_file")),
    ):
        limit = "".join(lines_of(group / limit_name))
        if limit.isdigit():  # not "max"
            usage = int("".join(lines_of(group / usage_name)) or 0)
            statistics = dict(line.split(maxsplit=1) for line in lines_of(group / "memory.stat"))
            return max(0, int(limit) - usage + sum(int(statistics.get(name, 0)) for name in cached_names))
    return None


def meminfo(field: str) -> int:
    """Return one line of /proc/meminfo: in bytes if the kernel gives kB, else as a count; 0 if there is no such line.

    If /proc is not mounted, or shows only processes, the lines of the NUMA nodes in /sys are summed. These have no MemAvailable,
    so free memory and cached files are returned for it. Without /sys too, MemAvailable is the free memory, and all other fields
    but MemTotal are 0.
    """
    if lines := lines_of(MEMINFO):
        return _sum(field, lines)
    # Each line begins with "Node 0", say, and goes on as in /proc/meminfo.
    if lines := [line.split(maxsplit=2)[2] for file in NODES.glob("node*/meminfo") for line in lines_of(file)]:
        parts = ("MemFree", "Active(file)", "Inactive(file)") if field == "MemAvailable" else (field,)
        return sum(_sum(part, lines) for part in parts)
    name = {"MemTotal": "SC_PHYS_PAGES", "MemAvailable": "SC_AVPHYS_PAGES"}.get(field)
    return os.sysconf(name) * os.sysconf("SC_PAGE_SIZE") if name else 0


def _sum(field: str, lines: list[str]) -> int:
    """Return the sum of a field over all lines that have it."""
    total = 0
    for line in lines:
        name, value = line.split(":", 1)
        if name == field:
            number, *unit = value.split()
            total += int(number) * (1024 if unit else 1)
    return total
