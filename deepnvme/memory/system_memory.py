"""Available memory: how much this process can still use, given what the machine has free and what its control groups allow."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import psutil

from deepnvme.drives.mounts import unescaped
from deepnvme.files.regular_files import lines_of

PROCESS = Path("/proc/self")
CONTROL_GROUPS = Path("/sys/fs/cgroup")


def available_memory() -> int:
    """Return how many bytes of memory this process can still use.

    This is the least of what the machine and each of the process's control groups have left. Memory that the kernel reclaims when
    it is needed, such as cached file pages, counts as available.
    """
    limited = [left for left in map(_left_in, _memory_groups(PROCESS)) if left is not None]
    return min([_left_on_machine(), *limited])


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


def _left_on_machine() -> int:
    """Return how many bytes the machine has available; where /proc is not mounted, how many are free."""
    try:
        available: int = psutil.virtual_memory().available
        return available
    except (OSError, KeyError):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
