"""What was counted between two moments: processor time, and an engine's statistics."""

from __future__ import annotations

import resource
from collections.abc import Mapping
from typing import Any

from .job import Paths


def cpu_seconds() -> float:
    """Of this process so far."""
    # All threads, the kernel's io_uring workers included: those belong to this process.
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def paths_between(before: Mapping[str, Any], after: Mapping[str, Any]) -> Paths:
    """What an engine moved between two looks at its statistics."""
    zero_copy, staged, buffered = (after[name] - before[name] for name in ("bytes_zero_copy", "bytes_staged", "bytes_buffered"))
    return Paths(zero_copy, staged, buffered, after.get("bytes_gds", 0) - before.get("bytes_gds", 0))


def latency_between(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[int, int]:
    """The blocks that ended between two looks at an engine's statistics."""
    earlier = before["block_latency"]
    new = {bound: count - earlier.get(bound, 0) for bound, count in after["block_latency"].items()}
    return {bound: count for bound, count in new.items() if count}
