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
    """The median."""
    low: float
    """The first quartile."""
    high: float
    """The third quartile."""

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Return median and quartiles of the values. Raises statistics.StatisticsError if there are none."""
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high)


def latency_between(before: Mapping[str, Any], after: Mapping[str, Any]) -> Counter[float]:
    """Return the histogram of latencies of the blocks that ended between two snapshots of an engine's statistics.

    Upper bounds of the bins in seconds, with the number of blocks; empty bins are left out.
    """
    blocks = Counter(after["block_latency"]) - Counter(before["block_latency"])
    return Counter({nanoseconds / 1e9: count for nanoseconds, count in blocks.items()})


@dataclass(frozen=True)
class Percentiles:
    """Percentiles of latencies in seconds, up to the longest, and how many there were."""

    p50: float
    """The median."""
    p90: float
    """90 % are not longer."""
    p99: float
    """99 % are not longer."""
    p999: float
    """99.9 % are not longer."""
    longest: float
    """The longest of all."""
    count: int
    """Number of latencies."""

    @classmethod
    def of(cls, counts: Mapping[float, int]) -> Percentiles:
        """Return the percentiles of times in seconds, each with the number of times that it was measured; at least one.

        Each percentile is one of these times: the smallest that at least that share does not exceed.
        """
        values = sorted(counts)
        seen = list(itertools.accumulate(counts[value] for value in values))
        p50, p90, p99, p999, longest = (
            values[bisect.bisect_left(seen, share * seen[-1])] for share in (0.5, 0.9, 0.99, 0.999, 1.0)
        )
        return cls(p50, p90, p99, p999, longest, seen[-1])
