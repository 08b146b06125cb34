"""Reads CPU time, and differences between two snapshots of an engine's statistics."""

from __future__ import annotations

import resource
from collections.abc import Mapping
from typing import Any

from .job import Paths


def cpu_seconds() -> float:
    """Return the CPU time in seconds, user and system, that this process has used so far."""
    # Of all threads, including the kernel's io_uring workers, which count as this process's.
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def paths_between(before: Mapping[str, Any], after: Mapping[str, Any]) -> Paths:
    """Return the bytes that an engine moved between two snapshots of its statistics, by their path."""
    zero_copy, staged, buffered = (after[name] - before[name] for name in ("bytes_zero_copy", "bytes_staged", "bytes_buffered"))
    return Paths(zero_copy, staged, buffered, after.get("bytes_gds", 0) - before.get("bytes_gds", 0))


def latency_between(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[int, int]:
    """Return the histogram of latencies of the blocks that ended between two snapshots of an engine's statistics.

    Upper bounds of the bins in nanoseconds, with the number of blocks; empty bins are left out.
    """
    earlier = before["block_latency"]
    new = {bound: count - earlier.get(bound, 0) for bound, count in after["block_latency"].items()}
    return {bound: count for bound, count in new.items() if count}
