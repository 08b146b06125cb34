"""Figures with their spread: rates over loops, latencies over blocks."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

_Key = TypeVar("_Key")


@dataclass(frozen=True)
class Spread:
    """A median between its quartiles. Half the loops lie inside, whatever one disturbed loop did."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Raises statistics.StatisticsError for no values."""
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high)


def merged(histograms: Iterable[Mapping[_Key, int]]) -> dict[_Key, int]:
    """What all of them have counted together."""
    total: Counter[_Key] = Counter()
    for each in histograms:
        total.update(each)
    return dict(total)


@dataclass(frozen=True)
class Percentiles:
    """How long most, and nearly all, took; seconds."""

    p50: float
    p90: float
    p99: float
    p999: float
    longest: float
    count: int

    @classmethod
    def of_seconds(cls, seconds: Sequence[float]) -> Percentiles:
        """Of the times themselves. Each percentile is one of them: the smallest that at least so many do not exceed."""
        counts: dict[float, int] = {}
        for each in seconds:
            counts[each] = counts.get(each, 0) + 1
        return cls._of(counts)

    @classmethod
    def of_bins(cls, nanoseconds: Mapping[int, int]) -> Percentiles:
        """Of a histogram as ``Stats.block_latency`` has it. Each percentile is the upper bound of the bin it falls into."""
        return cls._of({bound / 1e9: count for bound, count in nanoseconds.items()})

    @classmethod
    def _of(cls, counts: Mapping[float, int]) -> Percentiles:
        total = sum(counts.values())
        if total == 0:
            raise ValueError("percentiles of nothing")
        wanted = [0.5, 0.9, 0.99, 0.999, 1.0]
        found: list[float] = []
        seen = 0
        for value in sorted(counts):
            seen += counts[value]
            while len(found) < len(wanted) and seen >= wanted[len(found)] * total:
                found.append(value)
        p50, p90, p99, p999, longest = found
        return cls(p50, p90, p99, p999, longest, total)
