"""How much more memory this process can take: what the machine has left, and what its control groups leave it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from .meminfo import meminfo

_PROCESS = Path("/proc/self")
_GROUPS = Path("/sys/fs/cgroup")
_ESCAPED = re.compile(r"\\([0-7]{3})")
"""How mountinfo writes blanks and backslashes."""


def available_memory() -> int:
    """Bytes. Memory that the kernel takes back when it is needed, such as cached file pages, counts as available."""
    left = [meminfo("MemAvailable")]
    for group in _memory_groups(_PROCESS):
        left_in_group = _left_in(group)
        if left_in_group is not None:
            left.append(left_in_group)
    return min(left)


def _memory_groups(process: Path) -> Iterator[Path]:
    """The directories of the control groups that limit the process's memory: its own, then those around it."""
    memberships: dict[str, str] = {}
    for line in _lines(process / "cgroup"):
        _, controllers, name = line.split(":", 2)
        memberships[controllers] = name  # no controllers: version 2
    group: str | None
    mounts = _lines(process / "mountinfo")
    if not mounts:  # no /proc here; in a container the group of the process is what is mounted in the usual place
        yield from (_GROUPS, _GROUPS / "memory")
    for line in mounts:
        before, _, after = line.partition(" - ")
        root, mount_point = (_ESCAPED.sub(_character, field) for field in before.split()[3:5])
        filesystem, _, options = after.split(maxsplit=2)
        if filesystem == "cgroup2":
            group = memberships.get("")
        elif filesystem == "cgroup" and "memory" in options.split(","):
            group = next((name for controllers, name in memberships.items() if "memory" in controllers.split(",")), None)
        else:
            continue
        if group is None:
            continue
        # In a container the mount may begin at the process's group, or show none of the groups above it.
        inside = Path(group).relative_to(root) if Path(group).is_relative_to(root) else Path()
        directory = Path(mount_point, inside)
        yield directory
        yield from directory.parents[: len(inside.parts)]


def _left_in(group: Path) -> int | None:
    """Bytes that may still be taken in a control group of either version; None where it has no limit."""
    for limit_name, usage_name, cached_names in (
        ("memory.max", "memory.current", ("active_file", "inactive_file")),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_active_file", "total_inactive_file")),
    ):
        limit = "".join(_lines(group / limit_name))
        if limit.isdigit():  # not "max"
            usage = int("".join(_lines(group / usage_name)) or 0)
            statistics = dict(line.split(maxsplit=1) for line in _lines(group / "memory.stat"))
            return max(0, int(limit) - usage + sum(int(statistics.get(name, 0)) for name in cached_names))
    return None


def _character(escaped: re.Match[str]) -> str:
    return chr(int(escaped[1], 8))


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return []  # another system, or another version of control groups
