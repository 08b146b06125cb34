"""The search, on simulated drives whose truth is known and whose clock is theirs."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections.abc import Sequence
from typing import ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepnvme.config import AioConfig
from deepnvme.engine import Backend
from deepnvme.tune.measure.job import Operation
from deepnvme.tune.search.successive_halving import Candidate, Observation, Outcome, noise, relative_times, rounds, search

from ..support.examples import examples

MIB = 1 << 20
IO_SIZE = 400 * MIB
BOTH: tuple[Operation, ...] = ("read", "write")
_CPU_SECONDS_PER_BLOCK: dict[Backend, float] = {"auto": 4e-6, "io_uring": 4e-6, "libaio": 7e-6, "threads": 15e-6}


def usual_space() -> list[AioConfig]:
    """225 settings, as on a machine of two processors."""
    backends: tuple[Backend, ...] = ("auto", "libaio", "threads")
    grid = itertools.product(backends, (1, 2), range(17, 24), (4, 8, 16, 32, 64, 128))
    return [
        AioConfig(backend=backend, intra_op_parallelism=workers, block_size=1 << shift, queue_depth=depth)
        for backend, workers, shift, depth in grid
        if workers * depth << shift <= IO_SIZE
    ]


class Drive:
    """Settings differ by how well they fill it, and each by a share of its own that can only be found by measuring.

    ``noise``: the standard deviation of the logarithm of a transfer's time. Speed doubles or halves over ``drift_seconds``.
    """

    def __init__(
        self,
        choice: Sequence[AioConfig],
        seed: int = 0,
        noise: float = 0.08,
        own_share: float = 0.02,
        rates: tuple[float, float] = (3.3e9, 2.0e9),
        drift_seconds: float = 50.0,
    ) -> None:
        self.now = 0.0
        self.calls = 0
        self._random = random.Random(seed)
        self._noise = noise
        self._rates = dict(zip(BOTH, rates, strict=True))
        self._drift = self._random.choice((2.0, 0.5)), drift_seconds
        self._own = {(setting, operation): math.exp(self._random.gauss(0, own_share)) for setting in choice for operation in BOTH}

    def clock(self) -> float:
        return self.now

    def true_seconds(self, setting: AioConfig, operation: Operation, nbytes: int = IO_SIZE) -> float:
        rate, delay = self._rates[operation], 150e-6
        blocks = math.ceil(nbytes / setting.block_size)
        in_flight = min(blocks, setting.queue_depth * setting.intra_op_parallelism)
        waves = math.ceil(blocks / in_flight) * (delay + setting.block_size / rate)
        processor = math.ceil(blocks / setting.intra_op_parallelism) * _CPU_SECONDS_PER_BLOCK[setting.backend]
        return (max(nbytes / rate, waves, processor) + delay) * self._own[setting, operation]

    def measure(self, setting: AioConfig, operation: Operation, nbytes: int) -> Observation:
        self.calls += 1
        factor, over = self._drift
        slowness = factor ** min(self.now / over, 1.0)
        seconds = self.true_seconds(setting, operation, nbytes) * slowness * math.exp(self._random.gauss(0, self._noise))
        self.now += seconds + 0.003  # pages to drop, a handle to make
        cpu = math.ceil(nbytes / setting.block_size) * _CPU_SECONDS_PER_BLOCK[setting.backend]
        return Observation(nbytes, seconds, cpu, 1e-3, 2e-3)

    def shortfall(self, outcome: Outcome, operations: Sequence[Operation] = BOTH) -> float:
        """By how much more than the best of all the chosen setting takes in truth, as a share."""
        times = {
            candidate.setting: sum(self.true_seconds(candidate.setting, each) for each in operations)
            for candidate in outcome.ranked
        }
        return times[outcome.best.setting] / min(times.values()) - 1


def tune(drive: Drive, choice: Sequence[AioConfig], seconds: float = 50.0, operations: Sequence[Operation] = BOTH) -> Outcome:
    return search(choice, operations, drive.measure, IO_SIZE, seconds, clock=drive.clock)


# -- failures ----------------------------------------------------------------------------------------------------------


class Failing:
    """Raises ``error`` at one call, counted from nought."""

    def __init__(self, drive: Drive, call: int, error: BaseException) -> None:
        self._drive, self._call, self._error = drive, call, error

    def measure(self, setting: AioConfig, operation: Operation, nbytes: int) -> Observation:
        if self._drive.calls == self._call:
            raise self._error
        return self._drive.measure(setting, operation, nbytes)


@pytest.mark.parametrize("call", [0, 1, 2, 5, 40])
def test_an_error_of_a_transfer_passes_through(call: int) -> None:
    choice = usual_space()[:12]
    drive = Drive(choice)
    failing = Failing(drive, call, OSError(28, "No space left on device", "tensor"))
    with pytest.raises(OSError, match="No space left"):
        search(choice, BOTH, failing.measure, IO_SIZE, 1.0, clock=drive.clock)


def test_an_interrupt_at_any_call_keeps_what_was_measured() -> None:
    choice = usual_space()[:12]
    drive = Drive(choice)
    search(choice, BOTH, drive.measure, IO_SIZE, 1.0, clock=drive.clock)
    pilot = len(BOTH)
    for call in range(drive.calls):
        interrupted = Drive(choice)
        failing = Failing(interrupted, call, KeyboardInterrupt())
        if call < pilot + len(BOTH):  # before a setting has been measured both ways
            with pytest.raises(KeyboardInterrupt):
                search(choice, BOTH, failing.measure, IO_SIZE, 1.0, clock=interrupted.clock)
            continue
        outcome = search(choice, BOTH, failing.measure, IO_SIZE, 1.0, clock=interrupted.clock)
        assert not outcome.complete
        assert outcome.best in outcome.ranked
        assert len(outcome.ranked) == min((call - pilot) // len(BOTH), len(choice))
        # The round that the best is judged by has a whole pass of it.
        assert outcome.best.passes(outcome.rounds - 1)


def test_an_interrupt_of_the_progress_bar_keeps_what_was_measured_too() -> None:
    choice = usual_space()[:12]
    drive = Drive(choice)

    def progress(share: float, step: str) -> None:
        if drive.calls > 20:
            raise KeyboardInterrupt

    assert not search(choice, BOTH, drive.measure, IO_SIZE, 1.0, progress, drive.clock).complete


# -- what it finds -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variation", "runs", "misses_allowed"),
    # Of forty other seeds 0, 7 and 12 missed: chance makes the best of 225 stand out by 4 %, and where a transfer varies by 15 %
    # the passes that 50 s have room for leave 2 % of doubt.
    [(0.03, 10, 0), (0.08, 20, 5), (0.15, 20, 8)],
)
def test_what_is_chosen_takes_at_most_3_percent_longer_than_the_best(variation: float, runs: int, misses_allowed: int) -> None:
    choice = usual_space()
    found = []
    for seed in range(1000, 1000 + runs):
        drive = Drive(choice, seed, variation)
        found.append(drive.shortfall(tune(drive, choice)))
    assert sum(each > 0.03 for each in found) <= misses_allowed, sorted(found)
    assert max(found) <= 0.07


def test_where_the_settings_own_shares_are_nothing_it_never_misses() -> None:
    choice = usual_space()
    for seed in range(10):
        drive = Drive(choice, seed, 0.15, own_share=0.0)
        assert drive.shortfall(tune(drive, choice)) <= 0.03


@pytest.mark.parametrize("operation", BOTH)
def test_one_direction_alone_is_searched_by_itself(operation: Operation) -> None:
    choice = usual_space()[:40]
    drive = Drive(choice, 3, 0.03)
    outcome = tune(drive, choice, operations=(operation,))
    assert all(set(numbered) == {operation} for each in outcome.ranked for numbered in each.rounds)
    assert drive.shortfall(outcome, (operation,)) <= 0.03


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 10, 11, 40])
def test_few_settings_are_all_ranked_and_the_best_is_one_of_them(count: int) -> None:
    choice = usual_space()[:count]
    drive = Drive(choice, 1, 0.03)
    outcome = tune(drive, choice, 5.0)
    assert outcome.complete
    assert {each.setting for each in outcome.ranked} == set(choice)
    assert len(outcome.ranked) == count
    assert drive.shortfall(outcome) <= 0.03


def test_a_stalled_transfer_does_not_cost_a_setting_its_place() -> None:
    choice = usual_space()[:8]
    drive = Drive(choice, 5, noise=0.01, own_share=0.1)
    victim = min(choice, key=lambda each: sum(drive.true_seconds(each, way) for way in BOTH))
    stalled: list[float] = []

    def measure(setting: AioConfig, operation: Operation, nbytes: int) -> Observation:
        observed = drive.measure(setting, operation, nbytes)
        if setting == victim and len(stalled) < 2 and drive.calls > 60:
            stalled.append(drive.now)
            return Observation(nbytes, 10 * observed.seconds, observed.cpu_seconds, 1e-3, 2e-3)
        return observed

    assert search(choice, BOTH, measure, IO_SIZE, 20.0, clock=drive.clock).best.setting == victim
    assert stalled


# -- ties --------------------------------------------------------------------------------------------------------------


def searched(costs: dict[AioConfig, tuple[float, float]]) -> Outcome:
    """``costs``: seconds and CPU seconds for a GB."""

    def measure(setting: AioConfig, operation: Operation, nbytes: int) -> Observation:
        seconds, cpu = costs[setting]
        return Observation(nbytes, seconds * nbytes / 1e9, cpu * nbytes / 1e9, 1e-3, 2e-3)

    return search(list(costs), BOTH, measure, IO_SIZE, 0.0)


def chosen(costs: dict[AioConfig, tuple[float, float]]) -> AioConfig:
    return searched(costs).best.setting


SMALL = AioConfig(block_size=MIB, queue_depth=8)
LARGE = AioConfig(block_size=MIB, queue_depth=64)
LARGE_AUTO_SMALL_THREADS = (LARGE, AioConfig(block_size=MIB, queue_depth=8, backend="threads"))


def test_a_tie_goes_to_the_setting_that_takes_least_cpu_time() -> None:
    assert chosen({SMALL: (0.5, 0.08), LARGE: (0.501, 0.02)}) == LARGE
    assert chosen({LARGE: (0.501, 0.02), SMALL: (0.5, 0.08)}) == LARGE


def test_at_like_cpu_time_a_tie_goes_to_the_setting_without_a_backend() -> None:
    auto, threads = LARGE_AUTO_SMALL_THREADS
    assert chosen({threads: (0.5, 0.02), auto: (0.501, 0.021)}) == auto


def test_at_like_cpu_time_and_backend_a_tie_goes_to_the_least_memory() -> None:
    assert chosen({LARGE: (0.5, 0.02), SMALL: (0.501, 0.021)}) == SMALL


class Plateau(Drive):
    """As fast with every setting that has 16 MiB under way, at a processor time for each block that the backend decides."""

    _PER_BLOCK: ClassVar[dict[Backend, float]] = {"auto": 20e-6, "io_uring": 20e-6, "libaio": 30e-6, "threads": 60e-6}

    def true_seconds(self, setting: AioConfig, operation: Operation, nbytes: int = IO_SIZE) -> float:
        return nbytes / self._rates[operation] * max(1.0, 16 * MIB / setting.in_flight_bytes)

    def measure(self, setting: AioConfig, operation: Operation, nbytes: int) -> Observation:
        observed = super().measure(setting, operation, nbytes)
        cpu = math.ceil(nbytes / setting.block_size) * self._PER_BLOCK[setting.backend] * self._random.uniform(0.9, 1.3)
        return dataclasses.replace(observed, cpu_seconds=cpu)


@pytest.mark.parametrize("variation", [0.0, 0.03, 0.06])
def test_of_two_hundred_alike_one_of_the_cheapest_is_chosen_and_no_backend_named(variation: float) -> None:
    choice = usual_space()
    for seed in range(5):
        drive = Plateau(choice, seed, variation)
        setting = tune(drive, choice).best.setting
        assert setting.backend == "auto"
        assert setting.block_size >= MIB  # 0.02 CPU s/GB; the most expensive take 0.46
        assert setting.in_flight_bytes <= 128 * MIB


def test_what_is_faster_than_noise_wins_whatever_it_costs() -> None:
    assert chosen({LARGE: (0.5, 0.5), SMALL: (0.52, 0.01)}) == LARGE


def test_the_reason_is_true_also_where_the_chosen_one_has_most_memory_in_flight() -> None:
    auto, threads = LARGE_AUTO_SMALL_THREADS
    outcome = searched({threads: (0.5, 0.02), auto: (0.501, 0.021)})
    assert (outcome.best.setting, outcome.reason) == (
        auto,
        "within 0.5 % of the fastest, which counts as a tie; of 2 such, chosen by CPU time, then backend, then memory in flight",
    )


def test_the_reason_of_the_fastest_is_its_speed() -> None:
    assert searched({LARGE: (0.5, 0.5), SMALL: (0.52, 0.01)}).reason == "the fastest of 2, by more than 0.5 %"


def test_the_only_setting_is_not_said_to_have_beaten_any() -> None:
    assert searched({SMALL: (0.5, 0.02)}).reason == "the only setting"


# -- time --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rates", "seconds", "at_least", "at_most"),
    [
        ((14e9, 10e9), 50.0, 40, 53),
        ((3.3e9, 2.0e9), 50.0, 45, 53),
        ((0.5e9, 0.4e9), 50.0, 45, 55),
        ((0.5e9, 0.4e9), 10.0, 9, 20),
        # One pass over all is more than the share of the first round.
        ((0.1e9, 0.1e9), 50.0, 45, 60),
    ],
    ids=["a fast drive", "an ordinary drive", "a SATA drive", "in a hurry", "a hard disk"],
)
def test_it_takes_the_time_it_is_given(rates: tuple[float, float], seconds: float, at_least: int, at_most: int) -> None:
    choice = usual_space()
    drive = Drive(choice, 2, 0.05, rates=rates)
    assert tune(drive, choice, seconds).complete
    assert at_least <= drive.now <= at_most


def test_the_share_done_only_grows_and_ends_at_one() -> None:
    choice = usual_space()[:60]
    drive = Drive(choice)
    shares: list[float] = []
    search(choice, BOTH, drive.measure, IO_SIZE, 5.0, lambda share, step: shares.append(share), drive.clock)
    assert shares == sorted(shares)
    assert shares[0] < 0.1
    assert shares[-1] == 1.0


# -- properties --------------------------------------------------------------------------------------------------------


@given(st.integers(1, 5000))
def test_every_round_has_fewer_settings_than_the_one_before(count: int) -> None:
    counts = rounds(count)
    assert counts[0] == count
    assert all(later < earlier for earlier, later in itertools.pairwise(counts))
    assert counts[-1] <= 6
    assert count <= 10 or 10 in counts  # the table of the ten best


@settings(deadline=None, max_examples=examples(40))
@given(
    count=st.integers(1, 30),
    seed=st.integers(0, 1 << 32),
    io_size=st.sampled_from([1, 4097, MIB, 17 * MIB, IO_SIZE]),
    seconds=st.sampled_from([0.0, 0.5, 5.0]),
    variation=st.sampled_from([0.0, 0.3]),
    operations=st.sampled_from([("read",), ("write",), BOTH]),
)
def test_whatever_the_drive_each_setting_is_ranked_once_and_no_transfer_is_too_large(
    count: int, seed: int, io_size: int, seconds: float, variation: float, operations: tuple[Operation, ...]
) -> None:
    choice = usual_space()[:count]
    drive = Drive(choice, seed, variation)
    outcome = search(choice, operations, drive.measure, io_size, seconds, clock=drive.clock)
    assert sorted(map(str, choice)) == sorted(str(each.setting) for each in outcome.ranked)
    assert outcome.best in outcome.ranked
    assert [len(each.rounds) for each in outcome.ranked] == sorted((len(each.rounds) for each in outcome.ranked), reverse=True)
    observed = [each for found in outcome.ranked for numbered in found.rounds for way in numbered.values() for each in way]
    assert all(0 < each.nbytes <= io_size for each in observed)


def test_standings_do_not_know_the_drives_speed_at_the_time() -> None:
    def candidate(*seconds: float) -> Candidate:
        return Candidate(SMALL, [{"read": [Observation(MIB, each, 0.0, 1e-3, 2e-3) for each in seconds]}])

    # The second pass met the drive half as fast, the third not all of the settings.
    field = [candidate(1.0, 2.0, 1.0), candidate(1.1, 2.2), candidate(0.9, 1.8, 0.9)]
    fast, slow = relative_times(field, 0)[field[2]], relative_times(field, 0)[field[1]]
    assert fast == pytest.approx([0.9, 0.9, 0.9 / 0.95])
    assert slow == pytest.approx([1.1, 1.1])


def test_noise_shrinks_with_the_square_root_of_the_passes() -> None:
    choice = usual_space()[:10]
    outcome = tune(Drive(choice, noise=0.0), choice, 1.0)

    def passes(size: float, times: int) -> dict[Candidate, list[float]]:
        return {each: [1.0 + size, 1.0, 1.0 - size] * times for each in outcome.ranked}

    few, many = passes(0.01, 1), passes(0.01, 2)
    assert noise(few) == pytest.approx(math.sqrt(2) * noise(many))
    assert noise({each: [1.0, 1.0] for each in outcome.ranked}) == 0.0
    assert noise({each: [1.0] for each in outcome.ranked}) > 0.0  # of one pass nothing is known
