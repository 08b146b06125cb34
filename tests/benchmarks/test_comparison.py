"""Contenders in turns, and what is said of those who could not take theirs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from harness.comparison import Comparison, Counts, judge, measure_interleaved, times_as_fast
from harness.workloads import ContenderFailed


def silent(step: str) -> None:
    pass


@pytest.fixture
def order() -> list[str]:
    return []


@pytest.fixture
def contender(order: list[str]) -> Callable[[str, float], Callable[[], Counts]]:
    def make(name: str, seconds: float) -> Callable[[], Counts]:
        def turn() -> Counts:
            order.append(name)
            return {"seconds": seconds}

        return turn

    return make


def test_one_that_fails_is_left_out_from_there_on_and_the_verdict_says_why(
    order: list[str], contender: Callable[[str, float], Callable[[], Counts]]
) -> None:
    def broken() -> Counts:
        order.append("broken")
        raise ContenderFailed("its drive is gone")

    comparison = measure_interleaved("a title", {"ours": contender("ours", 1), "broken": broken}, 3, silent)
    assert order.count("broken") == 1
    assert order.count("ours") == 3
    verdict = judge(comparison, "a row", ("ours", "broken"), times_as_fast, "at least", 2)
    assert verdict.met is None
    assert verdict.note == "broken: its drive is gone"


def test_a_ratio_is_taken_round_by_round() -> None:
    # The drive became ten times as slow after the first round; ours was always twice as fast.
    comparison = Comparison({"ours": [{"seconds": 1}, {"seconds": 10}], "theirs": [{"seconds": 2}, {"seconds": 20}]})
    verdict = judge(comparison, "a row", ("ours", "theirs"), times_as_fast, "at least", 2)
    assert verdict.figure is not None
    assert (verdict.figure.low, verdict.figure.median, verdict.figure.high) == (2, 2, 2)
    assert verdict.met is True


def test_what_must_never_happen_is_not_forgiven_by_a_median() -> None:
    comparison = Comparison({"a": [{"seconds": 0}, {"seconds": 0}, {"seconds": 1}]}, {})
    assert judge(comparison, "x", ("a",), lambda sample: float(sample["seconds"]), "at most", 0).met
    assert not judge(comparison, "x", ("a",), lambda sample: float(sample["seconds"]), "at most", 0, summed=True).met
