"""The benchmark of ds_io and ds_nvme_tune: complete and tidy. Its figures are not looked at."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tuning

from deepnvme import AioConfig


@pytest.mark.slow
def test_every_target_has_a_line_and_nothing_is_left_behind(drive: Path, document_of: Callable[..., Any]) -> None:
    document = document_of(tuning.main, drive)
    assert len(document["targets"]) == 11
    regrets = [target["figure"]["median"] for target in document["targets"] if "regret" in target["what"]]
    assert len(regrets) == 2  # may be below zero
    assert sum(target["figure"]["median"] > 0 for target in document["targets"]) >= 9
    assert document["tuner"]["chosen"]["aio"]["block_size"] > 0
    (run,) = document["regret"]
    assert run["reason"]
    assert len(run["seconds_per_gb"]) == 10


SETTINGS = [AioConfig(queue_depth=depth) for depth in range(1, 11)]


def test_of_equal_settings_none_is_regretted() -> None:
    """Although by the noise of the rounds one looks better than the others."""
    order = random.Random(0)
    found = []
    for _ in range(200):
        seconds = {setting: [order.lognormvariate(0, 0.08) for _ in range(20)] for setting in SETTINGS}
        found.append(tuning.regret(SETTINGS[0], seconds).slower)
    assert abs(statistics.fmean(found)) < 0.01


def test_a_choice_that_is_slower_than_the_best_is_regretted_by_as_much() -> None:
    order = random.Random(0)
    found = []
    for _ in range(200):
        seconds = {setting: [order.lognormvariate(0, 0.08) for _ in range(20)] for setting in SETTINGS}
        seconds[SETTINGS[3]] = [0.8 * each for each in seconds[SETTINGS[3]]]
        found.append(tuning.regret(SETTINGS[0], seconds).slower)
    assert statistics.fmean(found) == pytest.approx(0.25, abs=0.02)
