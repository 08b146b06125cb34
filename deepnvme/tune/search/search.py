"""Successive halving: measure many settings briefly, keep the better part, measure those for longer, until few are left.

Pure but for the measuring function it is given, so that tests can search where the truth is known.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from deepnvme.config import AioConfig
from deepnvme.tune.measure.job import Operation

from .tuning import TABLE

# A third is kept each round: a setting must be measured badly, by a lot, in a short round to be lost.
_KEPT = 3
# After the round of those that are shown, a last one decides among few.
_FINALISTS = 6
# Passes over the settings of a round, to aim for and at most; of a late round, one no larger than the table, they are more. Short
# transfers and many: on the drive it was measured on, one of 16 MiB varies by 6-9 % and one of 400 MiB by 4-9 %.
_PASSES = 8
_LATE_PASSES, _MOST_LATE_PASSES = 16, 60
# What is called a tie in the end, whatever the noise: the second is what cheapness may cost in speed.
_LEAST_TIE, _MOST_TIE = 0.005, 0.015
# CPU times this much apart are told apart: seconds per GB, and as a share.
_CPU_STEP, _CPU_SHARE = 0.003, 0.15
# No transfer is shorter than this, of which a slow drive needs few bytes and a fast one no more than to fill its queues.
_SHORTEST_SECONDS, _SHORTEST_BYTES = 0.02, (4 << 20, 16 << 20)


@dataclass(frozen=True)
class Observation:
    """One transfer with one setting."""

    nbytes: int
    seconds: float
    cpu_seconds: float
    latency_p50: float
    """Seconds, of a block."""
    latency_p99: float


Measure = Callable[[AioConfig, Operation, int], Observation]
"""Moves at most so many bytes. May raise; the search then passes it on."""


@dataclass(eq=False)
class Candidate:
    """A setting, and what it has given, round by round."""

    setting: AioConfig
    rounds: list[dict[Operation, list[Observation]]] = field(default_factory=list)

    def passes(self, round_number: int) -> list[float]:
        """Seconds for a byte moved each way, as swapping does, pass by pass."""
        found = self.rounds[round_number].values()
        return [sum(each.seconds / each.nbytes for each in together) for together in zip(*found, strict=False)]

    def last_round(self, rounds: int) -> int:
        """The last of the first so many rounds that it has a whole pass of: what was interrupted in its first does not count."""
        return max(number for number in range(min(rounds, len(self.rounds))) if self.passes(number))

    def cpu_seconds_per_gb(self, round_number: int) -> float:
        """Of both ways together."""
        found = [cpu_seconds_per_gb(observed) for observed in self.rounds[round_number].values() if observed]
        return statistics.fmean(found)


def cpu_seconds_per_gb(observed: Sequence[Observation]) -> float:
    """The median, because other work of the process falls on a transfer now and then: the end of the handle before, for one."""
    return float(statistics.median(each.cpu_seconds / (each.nbytes / 1e9) for each in observed))


@dataclass(frozen=True)
class Outcome:
    """``ranked``: best first, those of the last round ahead of those that left earlier. ``best`` may stand behind others that are
    no faster than noise."""

    ranked: tuple[Candidate, ...]
    best: Candidate
    reason: str
    rounds: int
    complete: bool


def rounds(settings: int) -> list[int]:
    """How many of so many settings are in each round."""
    counts = [settings]
    while counts[-1] > _FINALISTS:
        least = TABLE if counts[-1] > TABLE else _FINALISTS
        counts.append(max(least, math.ceil(counts[-1] / _KEPT)))
    return counts


Progress = Callable[[float, str], None]
"""Told the share of the search that is done, and the step under way."""


def search(
    settings: Sequence[AioConfig],
    operations: Sequence[Operation],
    measure: Measure,
    io_size: int,
    seconds: float,
    progress: Progress = lambda share, step: None,
    clock: Callable[[], float] = time.monotonic,
) -> Outcome:
    """Find the setting that moves a byte each way (or the one way asked for) in the least time.

    ``seconds``: what to aim for; rounds share it equally, and transfers are as small as that needs, but not below 4 to 16 MiB;
    every setting is measured once at least, however long that takes. Ties within the noise that the last round shows go to the
    least CPU time, then to "auto", then to the least memory in flight. An interrupt (KeyboardInterrupt)
    ends the search with what it has; it is passed on if that is nothing.
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
            pace = bench.round(racing, pace, available, _part(progress, number, counts))
        complete = True
        progress(1.0, "done")
    except KeyboardInterrupt:
        if not any(candidate.rounds and candidate.passes(0) for candidate in candidates):
            raise
    return _judge(candidates, complete)


def standings(candidates: Sequence[Candidate], round_number: int) -> dict[Candidate, list[float]]:
    """Each candidate's time pass by pass, as a multiple of what the middle one took in that pass: the drive's speed at the time,
    which changes from pass to pass, cancels."""
    times = {candidate: candidate.passes(round_number) for candidate in candidates}
    count = max(map(len, times.values()), default=0)
    middles = [statistics.median(found[turn] for found in times.values() if turn < len(found)) for turn in range(count)]
    return {candidate: [each / middles[turn] for turn, each in enumerate(found)] for candidate, found in times.items()}


def typical(values: Sequence[float]) -> float:
    """The mean of the middle half: hardly moved by a stall, as the median is, but surer."""
    spare = len(values) // 4
    return statistics.fmean(sorted(values)[spare : len(values) - spare])


def noise(standings: Mapping[Candidate, Sequence[float]]) -> float:
    """The standard error of a candidate's typical time, relative to it, as its passes differ. Of one pass nothing is known, and
    that is taken to be as good as the worst tie allowed."""
    deviations: list[float] = []
    passes = 1
    for found in standings.values():
        passes = max(passes, len(found))
        middle = statistics.median(found)
        deviations += [abs(each / middle - 1) for each in found]
    if passes == 1:
        return _MOST_TIE
    # 1.4826 makes a standard deviation of a median deviation, 1.1 a middle half's standard error of a mean's. Two passes' middle
    # lies between them, which halves each one's distance.
    spread = statistics.median(deviations) * 1.4826 * (math.sqrt(2) if passes == 2 else 1)
    return 1.1 * spread / math.sqrt(passes)


@dataclass(frozen=True)
class _Pace:
    """What a transfer each way takes."""

    rate: float
    """Bytes per second, each way."""
    overhead: float
    """Seconds beside what was observed: pages to drop, handles to make."""

    def bytes_each(self, seconds: float, io_size: int) -> int:
        """What can be moved in ``seconds``, in whole MiB."""
        wanted = int(max(seconds - self.overhead, 0.0) * self.rate) >> 20 << 20
        low, high = _SHORTEST_BYTES
        shortest = min(max(int(_SHORTEST_SECONDS * self.rate) >> 20 << 20, low), high)
        return min(io_size, max(wanted, shortest))


@dataclass(frozen=True)
class _Bench:
    """What settings are measured with."""

    operations: Sequence[Operation]
    measure: Measure
    io_size: int
    clock: Callable[[], float]
    order: random.Random = field(default_factory=lambda: random.Random(0))

    def pilot(self, setting: AioConfig) -> _Pace:
        """Roughly; also the warm-up."""
        begin = self.clock()
        observed = [self.measure(setting, operation, min(self.io_size, 64 << 20)) for operation in self.operations]
        overhead = self.clock() - begin - sum(each.seconds for each in observed)
        return _Pace(1 / sum(each.seconds / each.nbytes for each in observed), max(overhead, 0.0))

    def round(self, racing: Sequence[Candidate], pace: _Pace, seconds: float, progress: Callable[[float], None]) -> _Pace:
        """Measure all of them pass by pass, for as long as ``seconds`` and the passes that are worth their time allow."""
        begin = self.clock()
        late = len(racing) <= TABLE
        nbytes = pace.bytes_each(seconds / (len(racing) * (_LATE_PASSES if late else _PASSES)), self.io_size)
        least, most = (2, _MOST_LATE_PASSES) if late else (1, _PASSES)  # two show the noise
        for candidate in racing:
            candidate.rounds.append({operation: [] for operation in self.operations})
        done = 0
        # One that is half over when time is up comes as close to it as none.
        while done < least or (done < most and (self.clock() - begin) * (1 + 0.5 / done) < seconds):
            for index, candidate in enumerate(self.order.sample(racing, len(racing))):
                by_time = (self.clock() - begin) / seconds if seconds else 1.0
                progress(min(max(by_time, (done + index / len(racing)) / most), 1.0))
                for operation in self.operations:
                    candidate.rounds[-1][operation].append(self.measure(candidate.setting, operation, nbytes))
            done += 1
        return _pace(racing, self.clock() - begin)


def _part(progress: Progress, number: int, counts: Sequence[int]) -> Callable[[float], None]:
    step = f"round {number + 1} of {len(counts)}: {counts[number]} settings"
    return lambda share: progress((number + share) / len(counts), step)


def _pace(racing: Sequence[Candidate], seconds: float) -> _Pace:
    """``seconds``: what the whole of the last round took."""
    observed = [each for candidate in racing for found in candidate.rounds[-1].values() for each in found]
    moving = sum(each.seconds for each in observed)
    rate = 1 / statistics.median(each for candidate in racing for each in candidate.passes(-1))
    return _Pace(rate, max(seconds - moving, 0.0) / len(observed) * len(racing[0].rounds[-1]))


def _promoted(racing: Sequence[Candidate], number: int, count: int) -> list[Candidate]:
    """Two thirds of the places go to the fastest; the others to the cheapest of those that may be as fast in truth, because it is
    among these that the tie of the last round is to be decided."""
    found = standings(racing, number)
    time = {candidate: typical(times) for candidate, times in found.items()}
    fastest = sorted(racing, key=time.__getitem__)
    chosen = fastest[: math.ceil(count * 2 / 3)]
    # The fastest of n alike is some sqrt(2 ln n) standard errors faster than they are; most of them are within one more.
    bound = time[fastest[0]] * (1 + (math.sqrt(2 * math.log(len(racing))) + 1) * noise(found))
    alike = [each for each in fastest[len(chosen) :] if time[each] <= bound]
    # Of those that name no backend first: one that must be insisted on should not win for want of another in the end.
    cheapest = sorted(_cheapest_first(alike, number), key=lambda each: each.setting.backend != "auto")[: count - len(chosen)]
    others = [each for each in fastest[len(chosen) :] if each not in cheapest]
    return chosen + cheapest + others[: count - len(chosen) - len(cheapest)]


def _cheapest_first(candidates: Sequence[Candidate], number: int) -> list[Candidate]:
    """By CPU time, as far as its differences count; then those that name no backend; then by the memory in flight."""
    cpu = {each: each.cpu_seconds_per_gb(number) for each in candidates}
    least = min(cpu.values(), default=0.0)
    step = max(_CPU_STEP, least * _CPU_SHARE)

    def cost(each: Candidate) -> tuple[int, bool, int, int]:
        setting = each.setting
        steps = int((cpu[each] - least) / step)
        return steps, setting.backend != "auto", setting.in_flight_bytes, setting.intra_op_parallelism

    return sorted(candidates, key=cost)


def _judge(candidates: Sequence[Candidate], complete: bool) -> Outcome:
    """By the last round of which a pass is whole. A setting that it did not reach stands by the round before."""
    last = 0
    while reached := [each for each in candidates if len(each.rounds) > last + 1]:
        if not all(each.passes(last + 1) for each in reached):
            break
        last += 1
    reached_by = {each: each.last_round(last + 1) for each in candidates if each.rounds and each.passes(0)}
    time: dict[Candidate, float] = {}
    for number in range(last + 1):
        # Against all that were in that round, those that went on included.
        found = standings([each for each in reached_by if reached_by[each] >= number], number)
        time |= {each: typical(times) for each, times in found.items() if reached_by[each] == number}
    ranked = sorted(reached_by, key=lambda each: (-reached_by[each], time[each]))
    final = standings([each for each in ranked if reached_by[each] == last], last)
    bound = min(max(1.5 * noise(final), _LEAST_TIE), _MOST_TIE)  # of a difference, which has the noise of both
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
