"""Estimates of differences between noisy measurements, with confidence intervals. A few stalled transfers hardly change either.

Intervals from the final are distribution-free. Rounds with few passes use a standard error that is estimated from all settings
of the round together, as if the noise were normal.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from deepnvme.drives.aio_config import AioConfig

CONFIDENCE = 0.95
"""Probability that all intervals of one table, taken together, contain the truth."""
# With fewer values, the normal approximation of Wilcoxon's statistic would give intervals that are too narrow.
_FEWEST_FOR_RANKS = 8


@dataclass(frozen=True)
class Difference:
    """How much longer a setting takes than the recommended one, relative to the recommended one's time: 0.02 is 2 % longer.

    Both were measured in the same passes, with transfers of the same length.
    """

    slower: float
    """Estimated difference, as a share of the time (0.02 is 2 %); negative if the setting was measured to be faster."""
    interval: tuple[float, float] | None
    """Lower and upper end of the confidence interval; None if too few passes were made to estimate the noise."""

    @property
    def distinguishable(self) -> bool:
        """Whether the interval excludes that the setting and the recommended one are equally fast."""
        return self.clearly_slower or (self.interval is not None and self.interval[1] < 0)

    @property
    def clearly_slower(self) -> bool:
        """Whether the setting is slower than the recommended one: the whole interval is above 0."""
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
    """Return the Hodges-Lehmann estimate: the median of the means of all pairs of values, a value with itself included.

    It is nearly as precise as the mean if the noise is normal, and stalls hardly affect it.
    """
    return statistics.median(_pair_means(values))


def _pair_means(values: Sequence[float]) -> list[float]:
    """Return the means of all pairs of values, a value with itself included (Walsh averages)."""
    return [(one + other) / 2 for one, other in itertools.combinations_with_replacement(values, 2)]


def differences(logarithms: Mapping[AioConfig, Sequence[float]], base: AioConfig) -> dict[AioConfig, Difference]:
    """Estimate how much longer each other setting takes than ``base``, with simultaneous confidence intervals.

    Args:
        logarithms: For each setting, the logarithms of its times, one for each pass.
        base: One of the settings.
    """
    apart = {
        setting: [ours - theirs for ours, theirs in zip(times, logarithms[base], strict=True)]
        for setting, times in logarithms.items()
        if setting != base
    }
    error = standard_error(apart.values())
    return {setting: difference(values, error, len(apart)) for setting, values in apart.items()}


def difference(values: Sequence[float], error: float | None, comparisons: int) -> Difference:
    """Return the difference between two settings, estimated from their difference in each pass.

    Args:
        values: For each pass, the logarithm of the ratio of the two settings' times.
        error: Standard error of the estimate, which gives the interval if there are few values; None if unknown.
        comparisons: Number of simultaneous intervals, which all hold together with the probability :data:`CONFIDENCE`.
    """
    means, count = sorted(_pair_means(values)), len(values)
    middle = statistics.median(means)
    quantile = statistics.NormalDist().inv_cdf(1 - (1 - CONFIDENCE) / comparisons / 2)
    # The bounds of Wilcoxon's signed-rank test, by the normal approximation of its statistic.
    rank = int(count * (count + 1) / 4 - quantile * math.sqrt(count * (count + 1) * (2 * count + 1) / 24))
    if count >= _FEWEST_FOR_RANKS and rank >= 0:
        low, high = means[rank], means[-1 - rank]
    elif error is not None:
        low, high = middle - quantile * error, middle + quantile * error
    else:
        return Difference(math.expm1(middle), None)
    return Difference(math.expm1(middle), (math.expm1(low), math.expm1(high)))


def standard_error(series: Iterable[Sequence[float]]) -> float | None:
    """Return the standard error of the Hodges-Lehmann estimate of a series, judged by the spread within all series.

    All series have equal length. Returns None if no series has two values, since they say nothing about the noise then.
    """
    values = list(series)
    apart = [abs(one - other) for found in values for one, other in itertools.combinations(found, 2)]
    if not apart:
        return None
    # Two values of a normal distribution are 0.954 standard deviations apart (the median). Under normal noise the Hodges-Lehmann
    # estimate has an efficiency of 3 / pi, compared with the mean.
    return statistics.median(apart) / 0.954 / math.sqrt(3 / math.pi * len(values[0]))
