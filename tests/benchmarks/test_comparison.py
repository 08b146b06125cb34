"""Contenders in turns, and what is said of those who could not take theirs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from harness.comparison import Comparison, Counts, judge, measure_interleaved, over_limit, times_as_fast
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


def test_every_second_round_goes_backwards(order: list[str], contender: Callable[[str, float], Callable[[], Counts]]) -> None:
    measure_interleaved("a title", {name: contender(name, 1) for name in "abc"}, 3, silent)
    assert "".join(order) == "abccbaabc"


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


def test_a_figure_may_need_three_contenders() -> None:
    comparison = Comparison({name: [{"seconds": seconds}] for name, seconds in (("a", 1), ("b", 2), ("c", 4))})
    of_all = ("a", "b", "c")
    verdict = judge(comparison, "a row", of_all, lambda *each: sum(one["seconds"] for one in each), "at most", 6)
    assert verdict.met is False


def test_a_step_is_measured_against_the_slower_of_drive_and_memory() -> None:
    limits = {"seconds": 1, "read": 2e9, "write": 4e9}
    offloaded = {"seconds": 3.0, "bytes_read": 2e9, "bytes_written": 2e9}
    assert over_limit(offloaded, limits, {"seconds": 1.0}) == pytest.approx(2.0)
    assert over_limit(offloaded, limits, {"seconds": 3.0}) == pytest.approx(1.0)
    # what is written beyond the states is no excuse
    alone = over_limit(offloaded, limits, {"seconds": 1.0}, state_bytes=10**9)
    needed = offloaded["bytes_read"] / limits["read"] + 1e9 / limits["write"]
    assert alone == pytest.approx(3.0 / needed)
    assert alone > over_limit(offloaded, limits, {"seconds": 1.0})


def test_what_must_never_happen_is_not_forgiven_by_a_median() -> None:
    comparison = Comparison({"a": [{"seconds": 0}, {"seconds": 0}, {"seconds": 1}]}, {})
    assert judge(comparison, "x", ("a",), lambda sample: float(sample["seconds"]), "at most", 0).met
    assert not judge(comparison, "x", ("a",), lambda sample: float(sample["seconds"]), "at most", 0, summed=True).met
