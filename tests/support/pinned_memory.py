"""How much memory this process has pinned."""

from __future__ import annotations

import re
from pathlib import Path


def pinned_bytes() -> int:
    """Return the bytes of this process that the kernel may not swap out."""
    found = re.search(r"VmLck:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024
