"""Processes with less memory than the machine has: a control group, made for the time of a ``with`` block."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

_GROUPS = Path("/sys/fs/cgroup")


@contextlib.contextmanager
def memory_limit(nbytes: int) -> Iterator[list[str]]:
    """Yield the beginning of a command line whose processes have at most so much memory, their page cache included.

    Its last word is the file into which a running process writes its number to be limited from then on.

    Raises OSError where no control group with a limit can be made: that takes root, and a controller for memory.
    """
    parent, field = _parent()
    group = Path(tempfile.mkdtemp(prefix="benchmark-", dir=parent))
    try:
        (group / field).write_text(str(nbytes))
        yield ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(group / "cgroup.procs")]
    finally:
        for _ in range(50):
            with contextlib.suppress(OSError):  # its last process is still ending
                os.rmdir(group)
                break
            time.sleep(0.1)


def _parent() -> tuple[Path, str]:
    """Return the group in which another is made, and the name of the file with its limit."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            return _GROUPS / "memory" / path.strip("/"), "memory.limit_in_bytes"
    return _GROUPS, "memory.max"  # of version 2, where a group with processes has no groups with limits but at the top
