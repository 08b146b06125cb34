"""What is said of noisy measurements: estimates, and intervals that contain the truth as often as they claim."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepnvme.drives.aio_config import AioConfig
from deepnvme.tools.tune.estimates import CONFIDENCE, difference, differences, hodges_lehmann, standard_error


def heavy_tailed(order: random.Random) -> float:
    """Noise of 8 %, and one value in ten far off, to either side."""
    return order.gauss(0, 0.08) if order.random() < 0.9 else order.choice((-1, 1)) * order.uniform(0.3, 1.5)


NOISES: list[Callable[[random.Random], float]] = [lambda order: order.gauss(0, 0.08), heavy_tailed]


def test_an_estimate_is_hardly_moved_by_a_stall() -> None:
    steady = [1.0, 1.01, 0.99, 1.02, 0.98, 1.0, 1.01, 0.99]
    assert hodges_lehmann([*steady, 10.0]) == pytest.approx(hodges_lehmann(steady), abs=0.01)
    assert hodges_lehmann([3.0]) == 3.0


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=12), st.floats(-10, 10))
def test_an_estimate_lies_within_the_values_and_moves_with_them(values: list[float], by: float) -> None:
    assert min(values) - 1e-9 <= hodges_lehmann(values) <= max(values) + 1e-9
    assert hodges_lehmann([each + by for each in values]) == pytest.approx(hodges_lehmann(values) + by, abs=1e-9)


def ends(values: list[float], error: float | None = None, comparisons: int = 1) -> tuple[float, float] | None:
    """The interval of logarithms."""
    found = difference(values, error, comparisons).interval
    return found and (math.log1p(found[0]), math.log1p(found[1]))


# Of published tables of Wilcoxon's signed-rank test: critical values at a two-sided 5 %.
@pytest.mark.parametrize(("count", "critical"), [(10, 8), (15, 25), (20, 52), (25, 89)])
def test_the_interval_is_that_of_wilcoxons_test(count: int, critical: int) -> None:
    """The end is the pair mean behind as many as the critical value."""
    values = [2.0 ** (nth - 20) for nth in range(count)]  # no two pair means are equal
    means = sorted((one + other) / 2 for index, one in enumerate(values) for other in values[index:])
    assert ends(values) == pytest.approx((means[critical], means[-1 - critical]))


@pytest.mark.parametrize("count", [1, 2, 5, 7])
def test_too_few_values_have_an_interval_by_the_noise_of_others_or_none(count: int) -> None:
    assert ends([0.0] * count) is None
    assert ends([0.5] * count, 0.1) == pytest.approx((0.5 - 0.196, 0.5 + 0.196), abs=1e-3)


# Early rounds have few passes and many settings; there a setting that stalled twice is taken for slow, as it would be by anyone.
@pytest.mark.parametrize(("draw", "passes", "count"), [(NOISES[0], 3, 60), *itertools.product(NOISES, (8, 20), (6,))])
def test_all_differences_of_a_table_contain_the_truth_as_often_as_is_said(
    draw: Callable[[random.Random], float], passes: int, count: int
) -> None:
    """Each setting is 2 % slower than the one before; the drift of a pass is common to all."""
    order = random.Random(7)
    held, tables = 0, 200
    settings = [AioConfig(queue_depth=depth) for depth in range(1, count + 1)]
    for _ in range(tables):
        drift = [order.gauss(0, 0.3) for _ in range(passes)]
        series = [[0.02 * nth + each + draw(order) for each in drift] for nth in range(count)]
        found = differences({setting: series[nth] for nth, setting in enumerate(settings)}, settings[0])
        truths = {setting: math.expm1(0.02 * nth) for nth, setting in enumerate(settings)}
        ends = {setting: each.interval for setting, each in found.items()}
        held += all(each is not None and each[0] <= truths[setting] <= each[1] for setting, each in ends.items())
    assert held / tables >= CONFIDENCE - 0.03


def test_the_noise_is_told_from_two_passes_as_well_as_from_many() -> None:
    order = random.Random(3)
    for passes in (2, 4, 16):
        series = [[order.gauss(0, 0.1) for _ in range(passes)] for _ in range(500)]
        actual = statistics.stdev(map(hodges_lehmann, series))
        assert standard_error(series) == pytest.approx(actual, rel=0.15)
    assert standard_error([[0.1], [0.2]]) is None
    assert standard_error([[0.1, 0.1]]) == 0.0
