"""Estimates and confidence intervals that few, heavy-tailed measurements hardly disturb.

Intervals are distribution-free where there are passes enough: eight for the five differences of a final. With fewer they are from
a pooled standard error, as if the noise were normal.
"""

from __future__ import annotations

import functools
import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95
"""Probability that all intervals of one table, taken together, contain the truth."""


@dataclass(frozen=True)
class Difference:
    """How much longer a setting takes than the recommended one, as a share of the recommended one's time: 0.02 is 2 % longer.

    Both were measured in the same passes, with transfers of the same length.
    """

    slower: float
    """The estimate; negative if the setting was measured to be faster."""
    interval: tuple[float, float] | None
    """Both ends of the interval around the estimate; None if a single pass says nothing about the noise."""

    @property
    def distinguishable(self) -> bool:
        """Whether the interval excludes that both are equally fast."""
        return self.interval is not None and (self.interval[0] > 0 or self.interval[1] < 0)

    @property
    def clearly_slower(self) -> bool:
        """Whether the interval excludes that the setting is as fast as the recommended one, or faster."""
        return self.interval is not None and self.interval[0] > 0

    @property
    def percent(self) -> float:
        """The estimate in per cent, rounded to one decimal, and never -0.0."""
        return round(100 * self.slower, 1) + 0.0

    @property
    def text(self) -> str:
        """The estimate and its interval in per cent: "1.2 % (95 % interval 0.3 to 2.1 %)"."""
        estimate = f"{self.percent:.1f} %"
        if self.interval is None:
            return estimate
        low, high = self.interval
        return f"{estimate} ({100 * CONFIDENCE:.0f} % interval {100 * low:.1f} to {100 * high:.1f} %)"


def hodges_lehmann(values: Sequence[float]) -> float:
    """Return the Hodges-Lehmann estimate: the median of the means of all pairs of values, each with itself, too.

    Nearly as precise as the mean where noise is normal, and hardly affected by stalls.
    """
    return statistics.median(_pair_means(values))


def difference(logarithms: Sequence[float], pooled_error: float | None, comparisons: int) -> Difference:
    """Estimate by how much longer a setting takes than another, with an interval.

    Args:
        logarithms: For each pass, the logarithm of the setting's time divided by the other's in the same pass.
        pooled_error: As for :func:`interval`.
        comparisons: As for :func:`interval`.
    """
    # The square root of 2: a difference has the noise of both settings.
    ends = interval(logarithms, None if pooled_error is None else pooled_error * math.sqrt(2), comparisons)
    slower = math.expm1(hodges_lehmann(logarithms))
    return Difference(slower, None if ends is None else (math.expm1(ends[0]), math.expm1(ends[1])))


def interval(values: Sequence[float], pooled_error: float | None, comparisons: int) -> tuple[float, float] | None:
    """Return the ends of a confidence interval for the middle of the values; None if there is no way to tell.

    It is that of Wilcoxon's signed-rank test, which holds for any symmetric noise. Where there are too few values for that, it
    is taken from ``pooled_error``.

    Args:
        values: The values.
        pooled_error: Standard error of the Hodges-Lehmann estimate, from all settings of the round; None if it is not known.
        comparisons: Number of intervals that shall hold together.
    """
    alpha = (1 - CONFIDENCE) / max(comparisons, 1)
    rank = _rank_of_bounds(len(values), alpha)
    if rank > 0:
        means = sorted(_pair_means(values))
        return means[rank - 1], means[-rank]
    if pooled_error is None:
        return None
    middle, reach = hodges_lehmann(values), statistics.NormalDist().inv_cdf(1 - alpha / 2) * pooled_error
    return middle - reach, middle + reach


def standard_error(series: Sequence[Sequence[float]]) -> float | None:
    """Return the standard error of the Hodges-Lehmann estimate of one of several series of logarithms, judged by all of them.

    Returns None if no series has two values: nothing is known about the noise then.
    """
    passes = max(map(len, series), default=0)
    if passes < 2:
        return None
    apart = [abs(one - other) for found in series for one, other in itertools.combinations(found, 2)]
    # Two values of a normal distribution are 0.954 standard deviations apart (the median). Under normal noise the Hodges-Lehmann
    # estimate has an efficiency of 3 / pi, compared with the mean.
    spread = statistics.median(apart) / 0.954 / math.sqrt(3 / math.pi)
    return spread / math.sqrt(passes)


def _pair_means(values: Sequence[float]) -> list[float]:
    """Return the means of all pairs of values, each with itself, too (Walsh averages)."""
    return [(one + other) / 2 for one, other in itertools.combinations_with_replacement(values, 2)]


@functools.lru_cache(maxsize=256)
def _rank_of_bounds(count: int, alpha: float) -> int:
    """Return the rank, from either end of the sorted pair means, of the bounds of the interval around ``count`` values.

    Returns 0 if ``count`` values are too few for the interval to hold with a probability of ``1 - alpha``.
    """
    # Number of the sets of ranks that have each sum: the exact distribution of Wilcoxon's statistic.
    ways = [1]
    for rank in range(1, count + 1):
        longer = ways + [0] * rank
        for total, number in enumerate(ways):
            longer[total + rank] += number
        ways = longer
    sums = itertools.accumulate(ways)
    return sum(1 for _ in itertools.takewhile(lambda below: below <= alpha / 2 * 2**count, sums))
