"""What stays in memory, as a table."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepnvme.integrations.deepspeed.swap_tensor.resident_tensors import Footprint, plan

ADAM = Footprint((1, 1, 1), 1)


@pytest.mark.parametrize(
    ("groups", "limit", "residents", "gradients"),
    [
        ([ADAM] * 8, 16, (3, 3, 2, 0, 0, 0, 0, 0), 5),  # two neighbours pass through, the rest stays, in order
        ([ADAM] * 8, 10, (2, 0, 0, 0, 0, 0, 0, 0), 5),
        ([ADAM] * 8, 8, (0,) * 8, 5),
        ([ADAM] * 8, 5, (0,) * 8, 2),
        ([ADAM] * 8, 3, (0,) * 8, 0),
        ([ADAM] * 8, 32, (3,) * 8, 8),  # everything fits
        ([ADAM] * 8, 31, (3, 3, 3, 3, 3, 3, 3, 2), 5),
        ([ADAM], 4, (3,), 1),
        ([ADAM], 3, (0,), 0),
        ([Footprint((9,), 1), Footprint((1,), 1), Footprint((1,), 1)], 13, (0, 0, 0), 3),  # no gap: the first does not fit
        ([Footprint((1,), 1), Footprint((1,), 1), Footprint((9,), 1)], 13, (1, 0, 0), 3),
        ([], 5, (), 0),
    ],
)
def test_the_first_sub_groups_stay_as_far_as_what_passes_through_leaves_room(
    groups: list[Footprint], limit: int, residents: tuple[int, ...], gradients: int
) -> None:
    decided = plan(groups, limit)
    assert decided.resident_states == residents
    assert sum(decided.kept_gradients) == gradients
    assert list(decided.kept_gradients) == sorted(decided.kept_gradients, reverse=True)


sizes = st.integers(0, 50)


@given(st.lists(st.builds(Footprint, st.lists(sizes, max_size=4).map(tuple), sizes), max_size=12), st.integers(0, 600))
def test_what_stays_and_two_neighbours_passing_fit_into_the_limit(groups: list[Footprint], limit: int) -> None:
    decided = plan(groups, limit)
    staying = [sum(group.states[:count]) for group, count in zip(groups, decided.resident_states, strict=True)]
    if any(decided.resident_states) and sum(staying):
        for at in range(len(groups)):
            passing = sum(group.total - stays for group, stays in list(zip(groups, staying, strict=True))[at : at + 2])
            assert sum(staying) + passing <= limit
    kept = sum(group.gradient for group, keep in zip(groups, decided.kept_gradients, strict=True) if keep)
    assert kept == decided.gradient_bytes
    assert sum(staying) + kept <= limit
