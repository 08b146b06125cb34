"""Medians, quartiles and percentiles."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepnvme.drives.aio_config import AioConfig
from deepnvme.tools.tune.figures import Percentiles, Spread, latency_between
from deepnvme.tools.tune.job import Job, Measurement, Place, Sample

RATES = st.lists(st.floats(min_value=1e-6, max_value=1e3), min_size=1, max_size=40)


@given(RATES)
def test_a_spread_is_in_order_whatever_the_order_of_the_loops(values: list[float]) -> None:
    spread = Spread.of(values)
    assert min(values) <= spread.low <= spread.median <= spread.high <= max(values)
    assert spread.median == pytest.approx(statistics.median(values))
    assert spread == Spread.of(values[::-1])


@given(st.lists(st.integers(min_value=1, max_value=50), min_size=1, max_size=3000))
def test_a_percentile_is_the_smallest_time_that_so_many_do_not_exceed(milliseconds: list[int]) -> None:
    seconds = [each / 1000 for each in milliseconds]
    ranked = sorted(seconds)

    def at(share: Fraction) -> float:
        return ranked[math.ceil(share * len(ranked)) - 1]

    shares = (Fraction(1, 2), Fraction(9, 10), Fraction(99, 100), Fraction(999, 1000), Fraction(1))
    assert Percentiles.of(Counter(seconds)) == Percentiles(*map(at, shares), count=len(seconds))


@given(st.lists(st.integers(min_value=1, max_value=10**12), min_size=1, max_size=200))
def test_bins_of_nanoseconds_are_latencies_in_seconds(nanoseconds: list[int]) -> None:
    before, after = Counter(nanoseconds), Counter([*nanoseconds, *nanoseconds])
    assert latency_between({"block_latency": before}, {"block_latency": after}) == Counter(each / 1e9 for each in nanoseconds)


def test_every_process_of_every_loop_is_a_request() -> None:
    def sample(*requests: float) -> Sample:
        return Sample(2, max(requests), 0.0, requests, None, Counter())

    place = Place(Path("folder"), 0)
    found = Measurement(
        Job((place, place), "read", 1, AioConfig()), (), None, "", (sample(0.1, 0.2), sample(0.1, 0.3)), {}
    )  # fmt: skip
    assert (found.request_latency.count, found.request_latency.p50, found.request_latency.longest) == (4, 0.1, 0.3)
    assert found.task_seconds == pytest.approx(0.5)
