"""Estimates of noisy measurements, and how sure they are. Few stalled transfers move neither by much.

Intervals of a final are distribution-free. Those of rounds with few passes are from a standard error that all settings of the
round tell together, as if the noise were normal.
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
        return self.clearly_slower or (self.interval is not None and self.interval[1] < 0)

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


def _pair_means(values: Sequence[float]) -> list[float]:
    """Return the means of all pairs of values, each with itself, too (Walsh averages)."""
    return [(one + other) / 2 for one, other in itertools.combinations_with_replacement(values, 2)]


def differences(logarithms: Mapping[AioConfig, Sequence[float]], base: AioConfig) -> dict[AioConfig, Difference]:
    """Estimate how much longer each of the other settings takes than ``base``, with intervals that hold together.

    Args:
        logarithms: For each setting the logarithms of its times, pass by pass.
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
    """Return a difference for its logarithms, pass by pass.

    Args:
        values: The logarithms.
        error: Their standard error, for an interval of few values; None if it is not known.
        comparisons: Number of intervals that shall hold together.
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
    """Return the standard error of the Hodges-Lehmann estimate of one of several series of equal length, judged by all of them.

    Returns None if no series has two values: nothing is known about the noise then.
    """
    values = list(series)
    apart = [abs(one - other) for found in values for one, other in itertools.combinations(found, 2)]
    if not apart:
        return None
    # Two values of a normal distribution are 0.954 standard deviations apart (the median). Under normal noise the Hodges-Lehmann
    # estimate has an efficiency of 3 / pi, compared with the mean.
    return statistics.median(apart) / 0.954 / math.sqrt(3 / math.pi * len(values[0]))
