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
from deepnvme.tune.measure.job import Observation, Operation

from .results import TABLE

# A third of the settings is kept each round: a good one is lost only if it is measured much too slow in a short round.
_KEPT = 3
# After the round with as many settings as are shown, a last one decides among this many.
_FINALISTS = 6
# Passes over the settings of a round: the number to aim for, which is also the limit. Late rounds, no larger than the table, have
# more. Many short transfers are better than few long ones: on the drive where it was measured, the speed of one of 16 MiB varies
# by 6-9 %, that of one of 400 MiB by 4-9 %.
_PASSES = 8
_LATE_PASSES, _MOST_LATE_PASSES = 16, 60
# Least and largest relative difference that counts as a tie in the end, whatever the noise. The second is how much speed may be
# given up for less CPU time.
_LEAST_TIE, _MOST_TIE = 0.005, 0.015
# CPU times count as different if they differ by this many seconds per GB, or by this share.
_CPU_STEP, _CPU_SHARE = 0.003, 0.15
# A transfer has at least the bytes that are moved in this many seconds; but for a slow drive no fewer than the first number, and
# for a fast one no more than the second, which fills its queues.
_SHORTEST_SECONDS, _SHORTEST_BYTES = 0.02, (4 << 20, 16 << 20)


Measure = Callable[[AioConfig, Operation, int], Observation]
"""A function that moves at most the given number of bytes with a setting. The search passes on what it raises."""


@dataclass(eq=False)
class Candidate:
    """A setting, and the observations made with it in each round."""

    setting: AioConfig
    """The setting."""
    rounds: list[dict[Operation, list[Observation]]] = field(default_factory=list)
    """For each round in which the setting took part, the observations of each operation, in the order of the passes."""

    def passes(self, round_number: int) -> list[float]:
        """Return, for each complete pass of a round, the seconds to move a byte in each direction, as swapping does."""
        found = self.rounds[round_number].values()
        return [sum(each.seconds / each.nbytes for each in together) for together in zip(*found, strict=False)]

    def last_round(self, rounds: int) -> int:
        """Return the last of the first ``rounds`` rounds in which the setting has a complete pass."""
        return max(number for number in range(min(rounds, len(self.rounds))) if self.passes(number))

    def cpu_seconds_per_gb(self, round_number: int) -> float:
        """Return the CPU seconds per 10^9 bytes in a round, the mean of the directions."""
        found = [cpu_seconds_per_gb(observed) for observed in self.rounds[round_number].values() if observed]
        return statistics.fmean(found)


def cpu_seconds_per_gb(observed: Sequence[Observation]) -> float:
    """Return the median of the CPU seconds per 10^9 bytes.

    The median, because other work of the process falls into a transfer now and then, such as closing the handle before.
    """
    return statistics.median(each.cpu_seconds_per_gb for each in observed)


@dataclass(frozen=True)
class Outcome:
    """The result of :func:`search`: the settings in their order, and the recommended one."""

    ranked: tuple[Candidate, ...]
    """Best first; those that reached the last round come before those that left earlier."""
    best: Candidate
    """The recommended setting. Others may be ranked before it that are faster only within the noise."""
    reason: str
    """Why it is recommended, in one line."""
    rounds: int
    """Number of rounds that count."""
    complete: bool
    """False if the search was interrupted."""


def rounds(settings: int) -> list[int]:
    """Return how many of ``settings`` settings take part in each round."""
    counts = [settings]
    while counts[-1] > _FINALISTS:
        least = TABLE if counts[-1] > TABLE else _FINALISTS
        counts.append(max(least, math.ceil(counts[-1] / _KEPT)))
    return counts


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
    progress: SearchProgress = lambda share, step: None,
    clock: Callable[[], float] = time.monotonic,
) -> Outcome:
    """Find the setting that moves a byte in each of the directions in the least time. Blocks.

    Every setting is measured at least once, however long that takes. Ties, within the noise that the last round shows, go to the
    least CPU time, then to the backend "auto", then to the least memory in flight.

    An interrupt (KeyboardInterrupt) ends the search with the results so far. If there are none, it is raised.

    Args:
        settings: The settings to choose from.
        operations: The directions to measure.
        measure: Makes one transfer.
        io_size: Bytes of the largest transfer.
        seconds: How long to search, approximately. Rounds share it equally. Transfers are made as small as necessary for it, but
            not smaller than 4 to 16 MiB.
        progress: Called with the share that is done and the current step.
        clock: Returns the time in seconds.
    """
    candidates = [Candidate(setting) for setting in settings]
    counts = rounds(len(candidates))
    bench = _Bench(operations, measure, io_size, clock)
    racing = candidates
    end = clock() + seconds
    complete = False
    try:
        pace = bench.pilot(settings[0])
        for number in range(len(counts)):
            if number > 0:
                racing = _promoted(racing, number - 1, counts[number])
            available = max(end - clock(), 0.0) / (len(counts) - number)
            step = f"round {number + 1} of {len(counts)}: {counts[number]} settings"
            pace = bench.round(racing, pace, available, partial_progress(progress, number, len(counts), step))
        complete = True
        progress(1.0, "done")
    except KeyboardInterrupt:
        if not any(candidate.rounds and candidate.passes(0) for candidate in candidates):
            raise
    return _judge(candidates, complete)


def relative_times(candidates: Sequence[Candidate], round_number: int) -> dict[Candidate, list[float]]:
    """Return each candidate's time in each pass of a round, divided by the median of all candidates in that pass.

    This cancels the drive's speed at the time, which changes from pass to pass.
    """
    times = {candidate: candidate.passes(round_number) for candidate in candidates}
    count = max(map(len, times.values()), default=0)
    middles = [statistics.median(found[number] for found in times.values() if number < len(found)) for number in range(count)]
    return {candidate: [each / middles[number] for number, each in enumerate(found)] for candidate, found in times.items()}


def typical(values: Sequence[float]) -> float:
    """Return the mean of the middle half of the values: hardly affected by a stall, like the median, but more precise."""
    spare = len(values) // 4
    return statistics.fmean(sorted(values)[spare : len(values) - spare])


def noise(relative: Mapping[Candidate, Sequence[float]]) -> float:
    """Return the relative standard error of a candidate's typical time, estimated from how passes differ.

    With only one pass nothing is known about it; the largest allowed tie is returned then.

    Args:
        relative: What :func:`relative_times` returned.
    """
    deviations: list[float] = []
    passes = 1
    for found in relative.values():
        passes = max(passes, len(found))
        middle = statistics.median(found)
        deviations += [abs(each / middle - 1) for each in found]
    if passes == 1:
        return _MOST_TIE
    # 1.4826 converts a median deviation to a standard deviation, 1.1 the standard error of a mean to that of a middle half. With
    # two passes the median lies between them, which halves the distance of each.
    spread = statistics.median(deviations) * 1.4826 * (math.sqrt(2) if passes == 2 else 1)
    return 1.1 * spread / math.sqrt(passes)


@dataclass(frozen=True)
class _Pace:
    """How long a transfer in each direction takes, for choosing the size of transfers."""

    rate: float
    """Bytes per second, moved in each direction."""
    overhead: float
    """Seconds outside of the measured time: dropping pages, making handles."""

    def bytes_each(self, seconds: float, io_size: int) -> int:
        """Return the bytes that can be moved in each direction in ``seconds``, in whole MiB, within the limits of a transfer."""
        wanted = int(max(seconds - self.overhead, 0.0) * self.rate) >> 20 << 20
        low, high = _SHORTEST_BYTES
        shortest = min(max(int(_SHORTEST_SECONDS * self.rate) >> 20 << 20, low), high)
        return min(io_size, max(wanted, shortest))


@dataclass(frozen=True)
class _Bench:
    """Measures the settings of a round."""

    operations: Sequence[Operation]
    measure: Measure
    io_size: int
    clock: Callable[[], float]
    order: random.Random = field(default_factory=lambda: random.Random(0))

    def pilot(self, setting: AioConfig) -> _Pace:
        """Estimate how long transfers take, by one in each direction, which is also the warm-up."""
        begin, nbytes = self.clock(), min(self.io_size, 64 << 20)
        observed = {operation: [self.measure(setting, operation, nbytes)] for operation in self.operations}
        return _pace([Candidate(setting, [observed])], self.clock() - begin)

    def round(self, racing: Sequence[Candidate], pace: _Pace, seconds: float, progress: SearchProgress) -> _Pace:
        """Measure all candidates pass by pass, for about ``seconds``, and return how long transfers took.

        The number of passes is limited: more would not be worth their time.
        """
        begin = self.clock()
        late = len(racing) <= TABLE
        nbytes = pace.bytes_each(seconds / (len(racing) * (_LATE_PASSES if late else _PASSES)), self.io_size)
        least, most = (2, _MOST_LATE_PASSES) if late else (1, _PASSES)  # at least two are needed to estimate the noise
        for candidate in racing:
            candidate.rounds.append({operation: [] for operation in self.operations})
        done = 0
        # Another pass is begun if at least half of it fits into the time: then it ends as close to the limit as without it.
        while done < least or (done < most and (self.clock() - begin) * (1 + 0.5 / done) < seconds):
            for index, candidate in enumerate(self.order.sample(racing, len(racing))):
                by_time = (self.clock() - begin) / seconds if seconds else 1.0
                progress(min(max(by_time, (done + index / len(racing)) / most), 1.0), "")
                for operation in self.operations:
                    candidate.rounds[-1][operation].append(self.measure(candidate.setting, operation, nbytes))
            done += 1
        return _pace(racing, self.clock() - begin)


def _pace(racing: Sequence[Candidate], seconds: float) -> _Pace:
    """Return how long transfers took in the last round, which took ``seconds`` in all."""
    observed = [each for candidate in racing for found in candidate.rounds[-1].values() for each in found]
    moving = sum(each.seconds for each in observed)
    rate = 1 / statistics.median(each for candidate in racing for each in candidate.passes(-1))
    return _Pace(rate, max(seconds - moving, 0.0) / len(observed) * len(racing[0].rounds[-1]))


def _promoted(racing: Sequence[Candidate], number: int, count: int) -> list[Candidate]:
    """Return the ``count`` candidates for the next round.

    Two thirds of the places go to the fastest. The others go to the candidates with the least CPU time of those that may really
    be as fast, because the tie in the last round is to be decided among these.
    """
    found = relative_times(racing, number)
    time = {candidate: typical(times) for candidate, times in found.items()}
    fastest = sorted(racing, key=time.__getitem__)
    chosen = fastest[: math.ceil(count * 2 / 3)]
    # Of n equally fast candidates, the fastest measured is about sqrt(2 ln n) standard errors faster than the truth; most others
    # are within one more.
    bound = time[fastest[0]] * (1 + (math.sqrt(2 * math.log(len(racing))) + 1) * noise(found))
    alike = [each for each in fastest[len(chosen) :] if time[each] <= bound]
    # Those with backend "auto" first: a named backend should not win at the end only because no other candidate is left.
    cheapest = sorted(_cheapest_first(alike, number), key=lambda each: each.setting.backend != "auto")[: count - len(chosen)]
    others = [each for each in fastest[len(chosen) :] if each not in cheapest]
    return chosen + cheapest + others[: count - len(chosen) - len(cheapest)]


def _cheapest_first(candidates: Sequence[Candidate], number: int) -> list[Candidate]:
    """Sort by CPU time in steps of a difference that counts; then "auto" before named backends; then by the memory in flight."""
    cpu = {each: each.cpu_seconds_per_gb(number) for each in candidates}
    least = min(cpu.values(), default=0.0)
    step = max(_CPU_STEP, least * _CPU_SHARE)

    def cost(each: Candidate) -> tuple[int, bool, int, int]:
        setting = each.setting
        steps = int((cpu[each] - least) / step)
        return steps, setting.backend != "auto", setting.in_flight_bytes, setting.intra_op_parallelism

    return sorted(candidates, key=cost)


def _judge(candidates: Sequence[Candidate], complete: bool) -> Outcome:
    """Rank the candidates by the last round in which all have a complete pass; a setting that left earlier by its own last."""
    last = 0
    while reached := [each for each in candidates if len(each.rounds) > last + 1]:
        if not all(each.passes(last + 1) for each in reached):
            break
        last += 1
    reached_by = {each: each.last_round(last + 1) for each in candidates if each.rounds and each.passes(0)}
    time: dict[Candidate, float] = {}
    for number in range(last + 1):
        # Relative to all candidates of that round, including those that were promoted.
        found = relative_times([each for each in reached_by if reached_by[each] >= number], number)
        time |= {each: typical(times) for each, times in found.items() if reached_by[each] == number}
    ranked = sorted(reached_by, key=lambda each: (-reached_by[each], time[each]))
    final = relative_times([each for each in ranked if reached_by[each] == last], last)
    bound = min(max(1.5 * noise(final), _LEAST_TIE), _MOST_TIE)  # 1.5: a difference has the noise of both candidates
    fastest = min(time[each] for each in final)
    tied = [each for each in final if time[each] <= fastest * (1 + bound)]
    best = _cheapest_first(sorted(tied, key=time.__getitem__), last)[0]
    if len(ranked) == 1:
        reason = "the only setting"
    elif len(tied) == 1:
        reason = f"the fastest of {len(ranked)}, by more than {100 * bound:.1f} %"
    else:
        reason = (
            f"within {100 * bound:.1f} % of the fastest, which counts as a tie; of {len(tied)} such, chosen by CPU time, then "
            "backend, then memory in flight"
        )
    return Outcome(tuple(ranked), best, reason, last + 1, complete)
