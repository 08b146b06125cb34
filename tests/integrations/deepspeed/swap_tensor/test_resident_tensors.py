"""What stays in memory, as a table."""

from __future__ import annotations

from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepnvme.integrations.deepspeed.swap_tensor.resident_tensors import choose_resident_tensors

ADAM = ((1, 1, 1), 1)


@pytest.mark.parametrize(
    ("groups", "limit", "residents", "gradients"),
    [
        ([ADAM] * 8, 16, 8, 5),  # two neighbours pass through, the rest stays, in order
        ([ADAM] * 8, 8, 0, 5),
        ([ADAM] * 8, 3, 0, 0),
        ([ADAM] * 8, 32, 24, 8),  # everything fits
        ([ADAM], 4, 3, 1),
        ([((9,), 1), ((1,), 1), ((1,), 1)], 13, 0, 3),  # no gap: the first does not fit
        ([((1,), 1), ((1,), 1), ((9,), 1)], 13, 1, 3),
        ([], 5, 0, 0),
    ],
)
def test_the_first_sub_groups_stay_as_far_as_what_passes_through_leaves_room(
    groups: list[tuple[tuple[int, ...], int]], limit: int, residents: int, gradients: int
) -> None:
    states = [states for states, _ in groups]
    assert choose_resident_tensors(states, [gradient for _, gradient in groups], limit) == (residents, gradients)


sizes = st.integers(0, 50)


@given(st.lists(st.tuples(st.lists(sizes, max_size=4), sizes), max_size=12), st.integers(0, 600))
def test_what_stays_and_two_neighbours_passing_fit_into_the_limit(groups: list[tuple[list[int], int]], limit: int) -> None:
    states, gradients = [group for group, _ in groups], [gradient for _, gradient in groups]
    resident, waiting = choose_resident_tensors(states, gradients, limit)
    staying = sum(list(chain.from_iterable(states))[:resident])
    if staying:
        passing = []  # of each sub-group, the bytes that do not stay
        left = resident
        for group, gradient in groups:
            passing.append(sum(group[left:]) + gradient)
            left = max(left - len(group), 0)
        assert all(staying + sum(passing[at : at + 2]) <= limit for at in range(len(groups)))
    assert staying + sum(gradients[:waiting]) <= limit
