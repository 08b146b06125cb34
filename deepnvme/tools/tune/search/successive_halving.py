"""Successive halving: measure many settings briefly, keep the better ones, measure these for longer, until few are left.

All measuring is done by a function that is passed in, so that tests can search where the true speeds are known.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from deepnvme.config import AioConfig
from deepnvme.tools.tune.measure.job import Observation, Operation

from .estimates import CONFIDENCE, Difference, difference, hodges_lehmann
from .plan import BATCH, Pace, RoundPlan, plan_round, settings_per_round, warm_up_bytes
from .round_data import Round, Sample, nearest_to_usual

# Least and largest relative difference that counts as a tie in the end, whatever the noise. The second is how much speed may be
# given up for less CPU time.
_LEAST_TIE, _MOST_TIE = 0.005, 0.015
# CPU times count as different if they differ by this many seconds per GB, or by this share.
_CPU_STEP, _CPU_SHARE = 0.003, 0.15


Measure = Callable[[AioConfig, Operation, int], Observation]
"""A function that moves at most the given number of bytes with a setting. The search passes on what it raises."""


@dataclass(frozen=True)
class Outcome:
    """The result of :func:`search`: the measurements, the order of the settings, and the recommended one."""

    rounds: tuple[Round, ...]
    """The rounds. The last one is the final, whose settings are compared most precisely."""
    ranked: tuple[AioConfig, ...]
    """The settings: the finalists, fastest first, then those that left earlier, latest first, fastest first in each round."""
    reference: AioConfig
    """The setting that shows the drift of the machine."""
    best: AioConfig
    """The recommended setting, a finalist. Others may be ranked before it that are faster only within the noise."""
    differences: Mapping[AioConfig, Difference]
    """How much longer each of the others takes than the recommended one, in the last round in which it was measured."""
    reason: str
    """Why it is recommended, in one line."""
    complete: bool
    """False if the search was interrupted."""
    shortened: bool
    """Whether the limit of bytes written ended a round before its time."""

    def last_round(self, setting: AioConfig) -> int:
        """Return the number of the last round in which a setting was measured."""
        return max(number for number, each in enumerate(self.rounds) if setting in each.samples)

    def reference_spread(self) -> float:
        """Return the median relative deviation of the reference transfers from their round's median time."""
        apart = []
        for each in self.rounds:
            middle = statistics.median(sample.seconds for sample in each.reference)
            apart += [abs(sample.seconds / middle - 1) for sample in each.reference]
        return statistics.median(apart)


SearchProgress = Callable[[float, str], None]
"""Called with the share of the search that is done, and a description of the current step."""


def partial_progress(progress: SearchProgress, number: int, count: int, what: str) -> SearchProgress:
    """Return a function that reports the progress of one of ``count`` equal parts as progress of the whole.

    Args:
        progress: Of the whole.
        number: Of the part.
        count: How many parts there are.
        what: Put before the part's own steps.
    """
    return lambda share, step: progress((number + share) / count, what + step)


def search(
    settings: Sequence[AioConfig],
    operations: Sequence[Operation],
    measure: Measure,
    io_size: int,
    seconds: float,
    max_writes: int | None = None,
    progress: SearchProgress = lambda share, step: None,
    clock: Callable[[], float] = time.monotonic,
) -> Outcome:
    """Find the setting that moves a byte in each of the directions in the least time. Blocks.

    Every setting is measured at least twice, however long that takes. In the final, settings that cannot be told apart are a tie,
    which goes to the least CPU time, then to the backend "auto", then to the least memory in flight.

    An interrupt (KeyboardInterrupt) ends the search with the results so far. If there are none, it is raised.

    Args:
        settings: The settings to choose from.
        operations: The directions to measure.
        measure: Makes one transfer.
        io_size: Bytes of the largest transfer.
        seconds: How long to search, approximately; less if ``max_writes`` is reached before. Transfers are made as small as
            necessary for it, but not smaller than 4 to 16 MiB.
        max_writes: The most bytes to ask ``measure`` to write; at least :func:`.plan.least_written`. None for no limit.
        progress: Called with the share that is done and the current step.
        clock: Returns the time in seconds.
    """
    remaining = list(dict.fromkeys(settings))
    counts = settings_per_round(len(remaining))
    runner = _RoundRunner(nearest_to_usual(remaining), operations, measure, clock, max_writes if "write" in operations else None)
    end = clock() + seconds
    complete = shortened = False
    try:
        pace = runner.warm_up(warm_up_bytes(len(remaining), io_size, runner.writes_left))
        for number in range(len(counts)):
            if number > 0:
                remaining = _promoted(runner.rounds[-1], counts[number])
            plan = plan_round(counts[number:], io_size, pace, end - clock(), runner.writes_left)
            shortened |= plan.shortened
            name = "the final" if len(counts) > 1 and number == len(counts) - 1 else f"round {number + 1} of {len(counts)}"
            step = f"{name}: {counts[number]} settings"
            pace = runner.round(remaining, plan, partial_progress(progress, number, len(counts), step))
        complete = True
        progress(1.0, "done")
    except KeyboardInterrupt:
        runner.drop_unfinished_round()
        if not runner.rounds:
            raise
    return _choose_best(runner, complete, shortened)


@dataclass
class _RoundRunner:
    """Measures the settings of each round, and keeps what it measured."""

    reference: AioConfig
    operations: Sequence[Operation]
    measure: Measure
    clock: Callable[[], float]
    writes_left: int | None
    """Bytes that may still be written; None for no limit."""
    rounds: list[Round] = field(default_factory=list)
    order: random.Random = field(default_factory=lambda: random.Random(0))

    def warm_up(self, nbytes: int) -> Pace:
        """Estimate how long transfers take, by one in each direction, which is also the warm-up."""
        begin = self.clock()
        return Pace.of(Round(nbytes, {self.reference: [self._sample(self.reference, nbytes, 0)]}), self.clock() - begin)

    def round(self, remaining: Sequence[AioConfig], plan: RoundPlan, progress: SearchProgress) -> Pace:
        """Measure all settings pass by pass, and return how long transfers took."""
        begin = self.clock()
        measured = Round(plan.nbytes, {setting: [] for setting in remaining})
        self.rounds.append(measured)
        done = 0
        # Another pass is begun if at least half of it fits into the time: then it ends as close to the limit as without it.
        while done < plan.least or (done < plan.most and (self.clock() - begin) * (1 + 0.5 / done) < plan.seconds):
            for index, setting in enumerate(self.order.sample(remaining, len(remaining))):
                by_time = (self.clock() - begin) / plan.seconds if plan.seconds else 1.0
                progress(min(max(by_time, (done + index / len(remaining)) / plan.most), 1.0), "")
                if index % BATCH == 0:
                    measured.reference.append(self._sample(self.reference, plan.nbytes, len(measured.reference)))
                sample = self._sample(setting, plan.nbytes, len(measured.reference) - 1)
                measured.samples[setting].append(sample)
            done += 1
        return Pace.of(measured, self.clock() - begin)

    def _sample(self, setting: AioConfig, nbytes: int, batch: int) -> Sample:
        """Make a transfer in each direction."""
        if self.writes_left is not None:
            self.writes_left -= nbytes
        return Sample({operation: self.measure(setting, operation, nbytes) for operation in self.operations}, batch)

    def drop_unfinished_round(self) -> None:
        """Forget the last round if it has no whole pass; of the first one, keep the settings that were measured."""
        if not self.rounds or self.rounds[-1].passes > 0:
            return
        unfinished = self.rounds.pop()
        measured = {setting: samples for setting, samples in unfinished.samples.items() if samples}
        if not self.rounds and measured:
            self.rounds.append(Round(unfinished.nbytes, measured, unfinished.reference))


def _promoted(measured: Round, count: int) -> list[AioConfig]:
    """Return the ``count`` settings for the next round.

    Two thirds of the places go to the fastest. The others go to the settings with the least CPU time of those that may really be
    as fast, because the tie in the final is to be decided among these.
    """
    time = {setting: hodges_lehmann(values) for setting, values in measured.log_times_without_drift().items()}
    fastest = sorted(time, key=time.__getitem__)
    chosen = fastest[: math.ceil(count * 2 / 3)]
    # Of n equally fast settings, the fastest measured is about sqrt(2 ln n) standard errors faster than the truth; most others
    # are within one more.
    margin = (math.sqrt(2 * math.log(len(time))) + 1) * (measured.standard_error() or _MOST_TIE)
    slower = _compared(measured, fastest[0])
    alike = [
        each
        for each in fastest[len(chosen) :]
        if time[each] <= time[fastest[0]] + margin and not slower[each].clearly_slower
    ]
    # Those with backend "auto" first: a named backend should not win at the end only because no other setting is left.
    cheapest = sorted(_cheapest_first(alike, measured), key=lambda each: each.backend != "auto")[: count - len(chosen)]
    others = [each for each in fastest[len(chosen) :] if each not in cheapest]
    return chosen + cheapest + others[: count - len(chosen) - len(cheapest)]


def _cheapest_first(settings: Sequence[AioConfig], measured: Round) -> list[AioConfig]:
    """Sort by CPU time in steps of a difference that counts; then "auto" before named backends; then by the memory in flight."""
    cpu = {each: measured.cpu_seconds_per_gb(each) for each in settings}
    least = min(cpu.values(), default=0.0)
    step = max(_CPU_STEP, least * _CPU_SHARE)

    def cost(each: AioConfig) -> tuple[int, bool, int, int]:
        steps = int((cpu[each] - least) / step)
        return steps, each.backend != "auto", each.in_flight_bytes, each.intra_op_parallelism

    return sorted(settings, key=cost)


def _choose_best(runner: _RoundRunner, complete: bool, shortened: bool) -> Outcome:
    """Choose a setting by the final, and compare all others with it, each in its last round."""
    final = runner.rounds[-1]
    time = {setting: hodges_lehmann(values) for setting, values in final.log_times_without_drift().items()}
    fastest = min(time, key=time.__getitem__)
    to_fastest = _compared(final, fastest)
    # 2.5: of six equally fast settings the fastest measured is 1.3 standard errors faster than the truth.
    bound = min(max(2.5 * (final.standard_error() or _MOST_TIE), _LEAST_TIE), _MOST_TIE)
    tied = [fastest, *(each for each, found in to_fastest.items() if _is_tie(found, bound))]
    best = _cheapest_first(tied, final)[0]
    differences: dict[AioConfig, Difference] = {}
    ranked: list[AioConfig] = []
    for each in reversed(runner.rounds):
        new = {other: found for other, found in _compared(each, best).items() if other not in differences}
        slower = {best: 0.0} if each is final else {}
        slower |= {other: found.slower for other, found in new.items()}
        ranked += sorted(slower, key=slower.__getitem__)
        differences |= new
    finalists = {each: differences[each] for each in time if each != best}
    reason = _reason(finalists, len(tied), bound, len(ranked))
    return Outcome(tuple(runner.rounds), tuple(ranked), runner.reference, best, differences, reason, complete, shortened)


def _compared(measured: Round, with_setting: AioConfig) -> dict[AioConfig, Difference]:
    """Return for each of the other settings of a round how much longer it takes than a given one."""
    found = measured.log_times_without_drift()
    error = measured.standard_error()
    base = found.pop(with_setting)
    return {
        setting: difference([one - other for one, other in zip(values, base, strict=True)], error, len(found))
        for setting, values in found.items()
    }


def _is_tie(found: Difference, bound: float) -> bool:
    """Return whether a setting counts as equally fast as the fastest. ``bound``: the largest difference for that."""
    return found.slower <= _LEAST_TIE or (found.slower <= bound and not found.distinguishable)


def _reason(finalists: Mapping[AioConfig, Difference], tied: int, bound: float, settings: int) -> str:
    """Return in one line why a setting is recommended, and how sure that is.

    Args:
        finalists: How much longer each of the other finalists takes.
        tied: Number of the settings that counted as equally fast, among which it was chosen.
        bound: Largest difference to the fastest for that.
        settings: Number of all settings.
    """
    if settings == 1:
        return "the only setting"
    count = len(finalists) + 1
    field = f"{count} settings" if count == settings else f"{count} finalists out of {settings} settings"
    nearest = min(finalists.values(), key=lambda each: each.slower)
    if nearest.interval is None:
        return f"the best of {field} by a single pass, which does not tell how sure that is"
    alike = [each for each in finalists.values() if not each.distinguishable or abs(each.slower) <= _LEAST_TIE]
    if not alike:
        return f"the fastest of {field}; the next one takes {nearest.text} longer"
    if tied == 1:
        return (
            f"measured as the fastest of {field}, but not distinguishable from {len(alike)} of the others; the next one takes "
            f"{nearest.text} longer"
        )
    faster = max(max(-each.interval[0], 0.0) for each in alike if each.interval is not None)
    others = f"{len(alike)} other{'s' if len(alike) > 1 else ''}"
    return (
        f"not distinguishable from {others} of {field}, none of which is faster by more than {100 * faster:.1f} % "
        f"({100 * CONFIDENCE:.0f} % confidence); chosen among {tied} measured within {100 * bound:.1f} % of the fastest, by CPU "
        "time, then backend, then memory in flight"
    )
