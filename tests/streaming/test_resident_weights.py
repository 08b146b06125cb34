"""What stays in memory has a pass read as little as the budget allows."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from deepnvme.streaming.resident_weights import residents, saved_bytes

from ..support.examples import examples


@settings(max_examples=examples(50), deadline=None)
@given(
    facts=st.lists(st.tuples(st.sampled_from([0, 1, 3, 5, 8]), st.integers(0, 3)), max_size=8),
    budget=st.integers(0, 30),
)
def test_no_other_choice_saves_more(facts: list[tuple[int, int]], budget: int) -> None:
    sizes = {str(index): size for index, (size, _) in enumerate(facts)}
    uses = {str(index): count for index, (_, count) in enumerate(facts)}
    chosen = residents(sizes, uses, budget)
    assert sum(sizes[key] for key in chosen) <= budget
    best = max(
        saved_bytes(some, sizes, uses)
        for count in range(len(sizes) + 1)
        for some in itertools.combinations(sizes, count)
        if sum(sizes[key] for key in some) <= budget
    )
    assert saved_bytes(chosen, sizes, uses) == best


def test_equals_are_spread_over_the_pass() -> None:
    sizes = {f"{index:02}": 10 for index in range(12)}
    assert sorted(residents(sizes, {}, 60)) == ["01", "03", "05", "07", "09", "11"]
    assert sorted(residents(sizes, {}, 45)) == ["02", "05", "08", "11"]
    assert residents(sizes, {}, 120) == set(sizes)


def test_all_different_sizes_are_chosen_nearly_as_well_and_quickly() -> None:
    sizes = {str(index): 10**6 + 7919 * index * index % 999_983 for index in range(60)}
    chosen = residents(sizes, {}, 3 * 10**7)
    assert 0.99 * 3 * 10**7 < saved_bytes(chosen, sizes, dict.fromkeys(sizes, 1)) <= 3 * 10**7
