"""The measurements of one round of a search, and what they say about its settings once the machine's drift is taken out."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from deepnvme.config import AioConfig
from deepnvme.tools.tune.measure.job import Observation, Operation

from .estimates import hodges_lehmann, interval, standard_error

# Reference transfers on either side of one that its drift is smoothed over.
_SMOOTHED = 2


@dataclass(frozen=True)
class Sample:
    """One transfer in each direction with one setting, one right after the other."""

    observed: Mapping[Operation, Observation]
    """The measured values of each direction."""
    batch: int
    """Number of the batch of the round in which it was made: of the reference transfer before it."""

    @property
    def seconds(self) -> float:
        """Seconds that the transfers took."""
        return sum(each.seconds for each in self.observed.values())

    @property
    def seconds_per_byte(self) -> float:
        """Seconds to move a byte in each direction."""
        return sum(each.seconds / each.nbytes for each in self.observed.values())


@dataclass(frozen=True)
class Speed:
    """The speed of one setting in one direction, in bytes per second."""

    rate: float
    """The estimate."""
    interval: tuple[float, float] | None
    """Ends of its confidence interval for a comparison with the other settings of the round; None if it is not known."""

    @classmethod
    def of(cls, logarithms: Sequence[float], pooled_error: float | None, comparisons: int) -> Speed:
        """Return the speed for the logarithms of the seconds per byte of each pass. See :func:`.estimates.interval`."""
        ends = interval(logarithms, pooled_error, comparisons)
        return cls(math.exp(-hodges_lehmann(logarithms)), None if ends is None else (math.exp(-ends[1]), math.exp(-ends[0])))


@dataclass(eq=False)
class Round:
    """The measurements of one round: all transfers have the same length, and all settings are measured in turn, pass by pass.

    A pass is divided into batches of a few settings, each after a transfer with the reference setting.
    """

    nbytes: int
    """Bytes of each transfer."""
    samples: dict[AioConfig, list[Sample]]
    """For each setting its samples, one for each pass."""
    reference: list[Sample] = field(default_factory=list)
    """Samples of the reference setting, one for each batch."""
    _speeds: dict[Operation, dict[AioConfig, Speed]] = field(default_factory=dict)
    """What :meth:`speeds` returned, which is asked once for each setting after the search."""

    @property
    def passes(self) -> int:
        """The number of passes in which every setting was measured."""
        return min(map(len, self.samples.values()), default=0)

    def log_times_without_drift(self, operation: Operation | None = None) -> dict[AioConfig, list[float]]:
        """Return for each setting, pass by pass, the logarithm of its seconds per byte without the machine's drift.

        Args:
            operation: The direction; None for the sum of those that were measured.
        """
        wanted = [operation] if operation is not None else self.operations
        drifts = {each: self.drift(each) for each in wanted}

        def seconds(sample: Sample) -> float:
            observed = ((each, sample.observed[each]) for each in wanted)
            return sum(each.seconds / each.nbytes / math.exp(drifts[way][sample.batch]) for way, each in observed)

        passes = self.passes
        found = {setting: [math.log(seconds(each)) for each in samples[:passes]] for setting, samples in self.samples.items()}
        middles = [statistics.median(each[number] for each in found.values()) for number in range(passes)]
        middle = statistics.median(middles)
        # The drift from pass to pass that the few reference transfers do not show: it is common to all settings.
        return {setting: [each - middles[nth] + middle for nth, each in enumerate(values)] for setting, values in found.items()}

    def drift(self, operation: Operation) -> list[float]:
        """Return for each batch the logarithm of how much slower than usual the machine was then, by the reference setting.

        A single transfer shows more noise than drift. So it is smoothed, and counts only by the share of its variance that is
        not noise: by how much less successive transfers differ than any two.
        """
        logarithms = [math.log(each.observed[operation].seconds) for each in self.reference]
        middle = statistics.median(logarithms)
        if len(logarithms) <= 2 * _SMOOTHED + 1:
            return [0.0] * len(logarithms)
        apart = statistics.median(abs(after - before) for before, after in itertools.pairwise(logarithms))
        around = statistics.median(abs(each - middle) for each in logarithms)
        noise_share = min((apart / math.sqrt(2) / around) ** 2, 1.0) if around > 0 else 1.0
        windows = [logarithms[max(nth - _SMOOTHED, 0) : nth + _SMOOTHED + 1] for nth in range(len(logarithms))]
        return [(1 - noise_share) * (statistics.median(window) - middle) for window in windows]

    def standard_error(self) -> float | None:
        """Return the standard error of a setting's estimated logarithm; None if there is only one pass."""
        return standard_error(list(self.log_times_without_drift().values()))

    def speeds(self, operation: Operation) -> dict[AioConfig, Speed]:
        """Return the speed of each setting in one direction, without the machine's drift."""
        if operation not in self._speeds:
            found = self.log_times_without_drift(operation)
            error = standard_error(list(found.values()))
            self._speeds[operation] = {each: Speed.of(values, error, len(found)) for each, values in found.items()}
        return self._speeds[operation]

    @property
    def operations(self) -> list[Operation]:
        """The directions that were measured."""
        return list(self.reference[0].observed)

    def observed(self, setting: AioConfig, operation: Operation) -> list[Observation]:
        """Return what was measured with a setting in one direction, pass by pass."""
        return [each.observed[operation] for each in self.samples[setting][: self.passes]]

    def cpu_seconds_per_gb(self, setting: AioConfig) -> float:
        """Return the CPU seconds per 10^9 bytes with a setting, the mean of the directions."""
        return statistics.fmean(cpu_seconds_per_gb(self.observed(setting, each)) for each in self.operations)


def cpu_seconds_per_gb(observed: Sequence[Observation]) -> float:
    """Return the median of the CPU seconds per 10^9 bytes.

    The median, because other work of the process falls into a transfer now and then, such as closing the handle before.
    """
    return statistics.median(each.cpu_seconds_per_gb for each in observed)


def nearest_to_usual(settings: Sequence[AioConfig]) -> AioConfig:
    """Return the setting to use as the reference: the backend "auto" if possible, and about 32 MiB in flight in blocks of 1 MiB.

    With few bytes in flight or small blocks it would show the machine's latency or processor rather than its drive.
    """

    def distance(setting: AioConfig) -> tuple[bool, float]:
        in_flight = abs(math.log2(setting.in_flight_bytes / (32 << 20)))
        return setting.backend != "auto", in_flight + abs(math.log2(setting.block_size / (1 << 20)))

    return min(settings, key=distance)
