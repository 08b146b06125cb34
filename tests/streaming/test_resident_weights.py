"""What stays in memory has a pass read little, and the drive always busy."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from deepnvme.streaming.resident_weights import residents


@given(
    sizes=st.dictionaries(st.text("abcdef", max_size=3), st.sampled_from([0, 1, 3, 5, 8]), max_size=8), budget=st.integers(0, 30)
)
def test_residents_fit_into_the_budget_and_nothing_more_does(sizes: dict[str, int], budget: int) -> None:
    chosen = residents(sizes, budget)
    left = budget - sum(sizes[key] for key in chosen)
    assert left >= 0
    assert all(sizes[key] > left for key in sizes.keys() - chosen)


def test_equals_are_spread_over_the_pass() -> None:
    sizes = {f"{index:02}": 10 for index in range(12)}
    assert sorted(residents(sizes, 60)) == ["01", "03", "05", "07", "09", "11"]
    assert sorted(residents(sizes, 45)) == ["02", "05", "08", "11"]
    assert residents(sizes, 120) == set(sizes)
