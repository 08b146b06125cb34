"""Statistics of measurements: median and quartiles of rates, percentiles of latencies."""

from __future__ import annotations

import bisect
import itertools
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of repeated measurements: half of them lie between the quartiles, even if one was disturbed."""

    median: float
    """Median of the measurements."""
    low: float
    """First quartile of the measurements."""
    high: float
    """Third quartile of the measurements."""

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Return median and quartiles of the values. Raises statistics.StatisticsError if there are none."""
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high)


def latency_between(before: Mapping[str, Any], after: Mapping[str, Any]) -> Counter[float]:
    """Return the latency histogram of the I/O blocks that completed between two snapshots of an engine's statistics.

    Keys are the upper bounds of the bins in seconds, values the numbers of I/O blocks. Empty bins are left out.
    """
    blocks = Counter(after["block_latency"]) - Counter(before["block_latency"])
    return Counter({nanoseconds / 1e9: count for nanoseconds, count in blocks.items()})


@dataclass(frozen=True)
class Percentiles:
    """Percentiles and maximum of latencies in seconds, and the number of latencies."""

    p50: float
    """Median latency in seconds."""
    p90: float
    """90th percentile in seconds: 90 % of the latencies are not longer."""
    p99: float
    """99th percentile in seconds: 99 % of the latencies are not longer."""
    p999: float
    """99.9th percentile in seconds: 99.9 % of the latencies are not longer."""
    longest: float
    """Longest latency in seconds."""
    count: int
    """Number of latencies."""

    @classmethod
    def of(cls, counts: Mapping[float, int]) -> Percentiles:
        """Return the percentiles of latencies that are given as a histogram.

        Each percentile is one of the given latencies: the smallest one that at least that share of the measurements is less than
        or equal to.

        Args:
            counts: Number of measurements for each latency in seconds; at least one entry.
        """
        values = sorted(counts)
        seen = list(itertools.accumulate(counts[value] for value in values))
        p50, p90, p99, p999, longest = (
            values[bisect.bisect_left(seen, share * seen[-1])] for share in (0.5, 0.9, 0.99, 0.999, 1.0)
        )
        return cls(p50, p90, p99, p999, longest, seen[-1])
