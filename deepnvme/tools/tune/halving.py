"""Successive halving: measure many settings briefly, then the better ones for longer, until few are left.

The measuring function is a parameter, so tests can search among settings whose true speeds are known.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from deepnvme.drives.aio_config import AioConfig

from .estimates import CONFIDENCE, Difference, differences, hodges_lehmann
from .job import OPERATIONS, Observation, Operation
from .results import Figures, Result, RoundFacts, Search

_FINALISTS = 6
# A quarter of the settings is kept each round: with 225, 57, 15 and 6, which leaves more bytes for each round than a third would.
_KEPT = 4
# Settings that are measured one after the other, from which the drift of the machine is judged.
_BATCH = 12
_POLISHES = 4
# Passes that are made however long they take: one alone would not tell the noise.
_LEAST_PASSES, _LEAST_FINAL_PASSES = 2, 8
# Passes over the settings of a round that transfers are made short enough for, and the most that are made. Few of them, so that
# transfers are long, although the speed of short ones hardly varies more: on a busy machine, where a worker waits for a
# processor, only much in flight keeps the drive busy, and a transfer of 30 MiB does not show that. (Measured on two processors
# with a load of eight: by such transfers, settings were chosen that take up to 26 % longer for 128 MiB than the best.)
_PASSES, _MOST_PASSES = 8, 16
_FINAL_PASSES, _MOST_FINAL_PASSES = 16, 96
# The final's share of time and bytes, in shares of another round.
_FINAL_WEIGHT = 2
# A transfer has at least the bytes that are moved in this many seconds; but for a slow drive no fewer than the first number, and
# for a fast one no more than the second, which fills its queues.
_SHORTEST_SECONDS, _SHORTEST_BYTES = 0.02, (4 << 20, 16 << 20)
_WARM_UP_BYTES = 64 << 20
# Least and largest relative difference that counts as a tie in the end, whatever the noise. The second is how much speed may be
# given up for less CPU time.
_LEAST_TIE, _MOST_TIE = 0.005, 0.015
# CPU times count as different if they differ by this many seconds per GB, or by this share.
_CPU_STEP, _CPU_SHARE = 0.003, 0.15

Measure = Callable[[AioConfig, Operation, int], Observation]
"""Function that transfers at most the given number of bytes with a setting, in one direction. What it raises ends the search."""
SearchProgress = Callable[[float, str], None]
"""Function called with the share of the search that is done (0 to 1), and a description of the current step."""


@dataclass(frozen=True)
class Sample:
    """One transfer in each direction with one setting, one right after the other."""

    observed: Mapping[Operation, Observation]
    """What was measured in each direction."""
    batch: int
    """Number of the batch, within its round, to which the transfers belong."""

    @property
    def seconds_per_byte(self) -> float:
        """Sum over the directions of the seconds to move one byte."""
        return sum(each.seconds / each.nbytes for each in self.observed.values())


@dataclass(eq=False)
class Round:
    """The measurements of one round: all transfers have the same length, and all settings are measured in turn, pass by pass."""

    nbytes: int
    """Bytes of each transfer."""
    samples: dict[AioConfig, list[Sample]]
    """The samples of each setting, one for each pass."""

    @property
    def passes(self) -> int:
        """Number of passes, in each of which every setting was measured."""
        return len(next(iter(self.samples.values())))

    def log_times(self) -> dict[AioConfig, list[float]]:
        """Return the logarithm of each setting's seconds per byte in each pass, with the machine's drift removed.

        The drift of a batch is how much longer its transfers took than is usual for their settings. Usual times and drifts are
        estimated in turn (Tukey's median polish).
        """
        times = {each: [math.log(sample.seconds_per_byte) for sample in found] for each, found in self.samples.items()}
        for _ in range(_POLISHES):
            batches: dict[int, list[float]] = defaultdict(list)
            for setting, values in times.items():
                usual = statistics.median(values)
                for sample, value in zip(self.samples[setting], values, strict=True):
                    batches[sample.batch].append(value - usual)
            drift = {number: statistics.median(values) for number, values in batches.items()}
            for setting, values in times.items():
                pairs = zip(self.samples[setting], values, strict=True)
                times[setting] = [value - drift[sample.batch] for sample, value in pairs]
        return times

    def observed(self, setting: AioConfig, operation: Operation) -> list[Observation]:
        """Return a setting's observations in one direction, one for each pass; an empty list if it was not measured."""
        return [each.observed[operation] for each in self.samples[setting] if operation in each.observed]

    def cpu_seconds_per_gb(self, setting: AioConfig) -> float:
        """Return a setting's CPU seconds per 10^9 bytes, averaged over the directions."""
        directions = self.samples[setting][0].observed
        return statistics.fmean(_cpu_seconds_per_gb(self.observed(setting, each)) for each in directions)


def _cpu_seconds_per_gb(observed: Sequence[Observation]) -> float:
    """Return the median of the CPU seconds per 10^9 bytes.

    A median, because a transfer's CPU time now and then includes other work of the process, such as closing the previous
    handle.
    """
    return statistics.median(each.cpu_seconds_per_gb for each in observed)


def search(
    settings: Sequence[AioConfig],
    operations: Sequence[Operation],
    measure: Measure,
    io_size: int,
    seconds: float,
    max_writes: int | None = None,
    progress: SearchProgress = lambda share, step: None,
    clock: Callable[[], float] = time.monotonic,
    auto: str = "auto",
) -> Search:
    """Find the setting that takes the least time to move a byte in every direction. Blocks.

    Every setting is measured at least twice, however long that takes. In the final, settings that cannot be told apart count as
    tied. Among these, the least CPU time decides, then the backend "auto", then the least memory in flight.

    Args:
        settings: The settings to choose from.
        operations: The directions to measure.
        measure: Makes one transfer.
        io_size: Bytes of the largest transfer.
        seconds: Approximate length of the search; less if ``max_writes`` is reached before. Transfers are made small enough to
            fit, but not smaller than 4 to 16 MiB.
        max_writes: The most bytes to write by ``measure``; at least :func:`least_written`. None for no limit.
        progress: Called at the beginning of each round with the share of the search that is done, and a description of the round.
        clock: Returns the time in seconds.
        auto: Name of the backend that "auto" selects, for the results.
    """
    remaining = list(dict.fromkeys(settings))
    counts = settings_per_round(len(remaining))
    begin = clock()
    runner = _Runner(operations, measure, clock, begin + seconds, max_writes if "write" in operations else None)
    runner.warm_up(max(remaining, key=lambda each: each.in_flight_bytes), counts, io_size)
    for number in range(len(counts)):
        if number > 0:
            remaining = _promoted(runner.rounds[-1], counts[number])
        name = "the final" if number == len(counts) - 1 > 0 else f"round {number + 1} of {len(counts)}"
        progress(number / len(counts), f"{name}: {counts[number]} settings")
        runner.round(remaining, counts[number:], io_size)
    return _results(runner.rounds, clock() - begin, runner.shortened, auto)


def settings_per_round(settings: int) -> list[int]:
    """Return how many of ``settings`` settings take part in each round; the last is the final."""
    counts = [settings]
    while counts[-1] > _FINALISTS:
        counts.append(max(_FINALISTS, math.ceil(counts[-1] / _KEPT)))
    return counts


def least_written(settings: int, io_size: int) -> int:
    """Return the fewest bytes that a search among ``settings`` settings writes."""
    return min(io_size, _SHORTEST_BYTES[0]) * (1 + _least_transfers(settings_per_round(settings)))


def _least_transfers(counts: Sequence[int]) -> int:
    """Return the fewest transfers that rounds make in each direction.

    Args:
        counts: Settings in each round, the last of which is the final; empty for no transfers.
    """
    return sum(counts[:-1]) * _LEAST_PASSES + sum(counts[-1:]) * _LEAST_FINAL_PASSES


@dataclass
class _Runner:
    """Measures the settings of each round within limits of time and bytes, and keeps the measurements."""

    operations: Sequence[Operation]
    measure: Measure
    clock: Callable[[], float]
    end: float
    """Time, by ``clock``, at which the search should end."""
    writes_left: int | None
    """Bytes that may still be written; None for no limit."""
    shortened: bool = False
    """Whether the limit on bytes written, rather than the time, ended a round."""
    rate: float = 0.0
    """Bytes per second in each direction during the previous round, including the time between transfers."""
    rounds: list[Round] = field(default_factory=list)
    order: random.Random = field(default_factory=lambda: random.Random(0))

    def warm_up(self, setting: AioConfig, counts: Sequence[int], io_size: int) -> None:
        """Make one transfer in each direction, to learn the rate that transfers reach."""
        nbytes = min(io_size, _WARM_UP_BYTES)
        if self.writes_left is not None:
            shortest = min(io_size, _SHORTEST_BYTES[0])
            nbytes = max(shortest, min(nbytes, self.writes_left - shortest * _least_transfers(counts)))
        begin = self.clock()
        self._sample(setting, nbytes, 0)
        self.rate = nbytes / (self.clock() - begin)

    def round(self, contenders: Sequence[AioConfig], counts: Sequence[int], io_size: int) -> None:
        """Measure all settings of a round, pass by pass.

        The remaining time and bytes are divided equally among the remaining rounds, but the final gets twice as much.

        Args:
            contenders: Settings to measure.
            counts: Number of settings in this round and in each later one.
            io_size: Bytes of the largest transfer.
        """
        begin, final = self.clock(), len(counts) == 1
        share = 1.0 if final else 1 / (_FINAL_WEIGHT + len(counts) - 1)
        seconds = max(self.end - begin, 0.0) * share
        least = _LEAST_FINAL_PASSES if final else _LEAST_PASSES
        nbytes, passes = self._plan(counts, least, io_size, seconds * self.rate, share)
        measured = Round(nbytes, {setting: [] for setting in contenders})
        self.rounds.append(measured)
        done = 0
        # Another pass is begun if at least half of it fits into the time: then it ends as close to the limit as without it.
        while done < least or (done < passes and (self.clock() - begin) * (1 + 0.5 / done) < seconds):
            for index, setting in enumerate(self.order.sample(contenders, len(contenders))):
                measured.samples[setting].append(self._sample(setting, nbytes, done * len(contenders) + index // _BATCH))
            done += 1
        self.rate = nbytes * done * len(contenders) / (self.clock() - begin)

    def _plan(
        self, counts: Sequence[int], least_passes: int, io_size: int, movable_bytes: float, write_share: float
    ) -> tuple[int, int]:
        """Plan a round. A pass makes one transfer in each direction with each of the round's settings.

        Args:
            counts: Number of settings in this round and in each later one.
            least_passes: Passes that are made however long they take.
            io_size: Bytes of the largest transfer.
            movable_bytes: Bytes that can be transferred in each direction in the round's time.
            write_share: Fraction of the bytes that may still be written that this round may write.

        Returns:
            The bytes of each transfer, and the most passes to make.
        """
        passes, most = (_FINAL_PASSES, _MOST_FINAL_PASSES) if len(counts) == 1 else (_PASSES, _MOST_PASSES)
        low, high = (min(io_size, each) for each in _SHORTEST_BYTES)
        shortest = min(max(_SHORTEST_SECONDS * self.rate, low), high)
        nbytes = _whole_mib(min(max(movable_bytes / (counts[0] * passes), shortest), io_size))
        if self.writes_left is None:
            return nbytes, most
        later = low * _least_transfers(counts[1:])
        writes = min(max(self.writes_left * write_share, low * least_passes * counts[0]), self.writes_left - later) / counts[0]
        allowed = _whole_mib(min(nbytes, max(writes / passes, high), writes / least_passes))
        possible = min(most, int(writes // allowed))
        self.shortened |= possible < min(most, movable_bytes / (counts[0] * allowed))
        return allowed, possible

    def _sample(self, setting: AioConfig, nbytes: int, batch: int) -> Sample:
        """Make one transfer in each direction with a setting."""
        if self.writes_left is not None:
            self.writes_left -= nbytes
        return Sample({operation: self.measure(setting, operation, nbytes) for operation in self.operations}, batch)


def _whole_mib(nbytes: float) -> int:
    """Round down to whole MiB; below 1 MiB, to whole bytes."""
    return int(nbytes) >> 20 << 20 or int(nbytes)


# What follows from a round.


def _promoted(measured: Round, count: int) -> list[AioConfig]:
    """Return the ``count`` settings that take part in the next round.

    Two thirds are the fastest settings. The others have the least CPU time among the settings that may be as fast as the
    fastest one, because CPU time decides a tie in the final.
    """
    logarithms = measured.log_times()
    fastest = sorted(logarithms, key=lambda each: hodges_lehmann(logarithms[each]))
    sure = math.ceil(count * 2 / 3)
    slower = differences(logarithms, fastest[0])
    alike = [each for each in fastest[sure:] if not slower[each].clearly_slower]
    # Those with backend "auto" first: a named backend should not win at the end only because no other setting is left.
    cheapest = sorted(_cheapest_first(alike, measured), key=lambda each: each.backend != "auto")
    return list(dict.fromkeys([*fastest[:sure], *cheapest[: count - sure], *fastest]))[:count]


def _cheapest_first(settings: Sequence[AioConfig], measured: Round) -> list[AioConfig]:
    """Sort settings by CPU time, then "auto" before named backends, then by memory in flight.

    CPU times that differ too little to matter count as equal.
    """
    cpu = {each: measured.cpu_seconds_per_gb(each) for each in settings}
    least = min(cpu.values(), default=0.0)
    step = max(_CPU_STEP, least * _CPU_SHARE)

    def cost(each: AioConfig) -> tuple[int, bool, int, int]:
        steps = int((cpu[each] - least) / step)
        return steps, each.backend != "auto", each.in_flight_bytes, each.intra_op_parallelism

    return sorted(settings, key=cost)


def _results(rounds: Sequence[Round], seconds: float, shortened: bool, auto: str) -> Search:
    """Choose the recommended setting from the final, and compare each other setting with it in that setting's last round."""
    final = rounds[-1]
    logarithms = final.log_times()
    fastest = min(logarithms, key=lambda each: hodges_lehmann(logarithms[each]))
    tied = [fastest, *(each for each, found in differences(logarithms, fastest).items() if _is_tie(found))]
    best = _cheapest_first(tied, final)[0]
    results: dict[AioConfig, Result] = {}
    for number, measured in enumerate(rounds, start=1):
        compared = differences(measured.log_times(), best)
        for setting in measured.samples:
            read, write = (_figures(setting, best, operation, measured, final) for operation in OPERATIONS)
            backend = auto if setting.backend == "auto" else setting.backend
            results[setting] = Result(setting, backend, read, write, number, compared.get(setting))
    ranked = sorted(results.values(), key=lambda each: (-each.rounds, each.difference.slower if each.difference else 0.0))
    finalists = [each.difference for each in ranked if each.difference is not None and each.rounds == len(rounds)]
    series = [values for each in rounds for values in each.log_times().values()]
    return Search(
        folders=(),
        best=results[best],
        reason=_reason(finalists, len(tied), len(ranked)),
        rounds=len(rounds),
        seconds=seconds,
        results=tuple(ranked),
        measured=tuple(RoundFacts(len(each.samples), each.passes, each.nbytes) for each in rounds),
        noise=math.expm1(statistics.median(abs(each - statistics.median(values)) for values in series for each in values)),
        shortened=shortened,
    )


def _figures(setting: AioConfig, best: AioConfig, operation: Operation, measured: Round, final: Round) -> Figures | None:
    """Return a setting's values in one direction in a round, with the rate scaled to the final; None if not measured."""
    found = measured.observed(setting, operation)
    if not found:
        return None
    # Rounds differ in the size of transfers; the recommended setting took part in all of them.
    rates = [found, final.observed(best, operation), measured.observed(best, operation)]
    rate, then, now = (statistics.median(each.gb_per_second for each in observed) for observed in rates)
    return Figures(
        gb_per_second=rate * then / now,
        cpu_seconds_per_gb=_cpu_seconds_per_gb(found),
        latency_p99=statistics.median(each.block_latency_p99 for each in found),
    )


def _is_tie(found: Difference) -> bool:
    """Return whether a setting counts as tied with the fastest one."""
    return found.slower <= _LEAST_TIE or (found.slower <= _MOST_TIE and not found.distinguishable)


def _reason(finalists: Sequence[Difference], tied: int, settings: int) -> str:
    """Return a line that says why a setting is recommended, and how sure that is.

    Args:
        finalists: How much longer each of the other finalists takes.
        tied: Number of settings that counted as equally fast, among which the recommended one was chosen.
        settings: Number of all settings.
    """
    if settings == 1:
        return "the only setting"
    count = len(finalists) + 1
    field = f"{count} settings" if count == settings else f"{count} finalists out of {settings} settings"
    nearest = min(finalists, key=lambda each: each.slower)
    alike = [each for each in finalists if not each.distinguishable or abs(each.slower) <= _LEAST_TIE]
    if tied == 1:
        sure = f", but not distinguishable from {len(alike)} of the others" if alike else ""
        return f"{'measured as ' if alike else ''}the fastest of {field}{sure}; the next one takes {nearest.text} longer"
    faster = max((max(-each.interval[0], 0.0) for each in alike if each.interval is not None), default=math.inf)
    return (
        f"not distinguishable from {len(alike)} other{'s' if len(alike) > 1 else ''} of {field}, none of which is faster by more "
        f"than {100 * faster:.1f} % ({100 * CONFIDENCE:.0f} % confidence); chosen among {tied} measured within "
        f"{100 * _MOST_TIE:.1f} % of the fastest, by CPU time, then backend, then memory in flight"
    )
