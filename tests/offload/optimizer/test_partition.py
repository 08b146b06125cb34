"""How parameters are cut into sub-groups: everything once, in order, in pieces that can be read and stepped by themselves."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepnvme.states.params import ParamSlice
from deepnvme.states.partition import CUT, partition

ELEMENTS = st.one_of(
    st.integers(0, 5),
    st.integers(0, 5 * CUT),
    st.builds(lambda pages, more: max(0, pages * CUT + more), st.integers(0, 6), st.integers(-3, 3)),
)
SIZES = st.one_of(st.integers(1, 10), st.integers(1, 4 * CUT), st.sampled_from([CUT - 1, CUT, CUT + 1, 2 * CUT, 3 * CUT]))
GROUPS = st.lists(st.lists(st.tuples(ELEMENTS, st.booleans()), max_size=6), min_size=1, max_size=3)
Groups = Sequence[Sequence[tuple[int, bool]]]


def partitioned(groups: Groups, size: int) -> tuple[list[list[ParamSlice]], list[tuple[torch.Tensor, int, bool]]]:
    """The sub-groups, and all parameters with their group and whether they may be cut."""
    params = [[torch.empty(numel) for numel, _ in group] for group in groups]
    cut = {param: may for group, these in zip(groups, params, strict=True) for (_, may), param in zip(group, these, strict=True)}
    found = partition([{"params": group} for group in params], size, lambda param: cut[param])
    return found, [(param, index, cut[param]) for index, group in enumerate(params) for param in group]


@settings(max_examples=60)
@given(GROUPS, SIZES)
def test_every_element_is_in_one_piece_in_order_in_sub_groups_no_larger_than_wanted(groups: Groups, size: int) -> None:
    found, params = partitioned(groups, size)
    placed = [(index, piece) for index, sub_group in enumerate(found) for piece in sub_group]
    pieces = [piece for _, piece in placed]
    assert all(piece.begin % CUT == 0 for piece in pieces)  # where pages and vectors end
    for param, group, may_be_cut in params:
        own = []
        while pieces and pieces[0].param is param:
            own.append(pieces.pop(0))
        assert own[0].begin == 0
        assert own[-1].end == param.numel()
        assert all(before.end == after.begin for before, after in pairwise(own))
        assert {piece.group for piece in own} == {group}
        assert all(piece.whole == (len(own) == 1) for piece in own)
        assert may_be_cut or len(own) == 1
        assert len(own) == 1 or all(piece.numel > 0 for piece in own)
        where = [index for index, piece in placed if piece.param is param]
        assert where == list(range(where[0], where[0] + len(where)))
    assert not pieces
    uncut = {param for param, _, may_be_cut in params if not may_be_cut}
    for sub_group in found:
        assert sub_group, "a sub-group of nothing"
        numel = sum(piece.numel for piece in sub_group)
        assert numel <= max(CUT, size) or any(piece.param in uncut and piece.numel > size for piece in sub_group)


def test_sub_groups_are_well_filled() -> None:
    found, _ = partitioned([[(1_000, True)] * 1_000 + [(1_000_003, True)] * 10], 65_536)
    elements = [sum(piece.numel for piece in sub_group) for sub_group in found]
    assert sum(elements) / len(elements) > 0.85 * 65_536


@pytest.mark.parametrize("more", [1, 2, 3])
def test_a_few_elements_more_than_a_sub_group_takes_are_in_the_next(more: int) -> None:
    found, _ = partitioned([[(CUT + more, True)]], CUT)
    assert [[piece.numel for piece in sub_group] for sub_group in found] == [[CUT], [more]]


def test_a_group_that_is_added_later_has_its_own_number() -> None:
    found = partition([{"params": [torch.empty(3)]}], 10, lambda param: True, first_group=2)
    assert [piece.group for sub_group in found for piece in sub_group] == [2]


def test_no_parameters_make_no_sub_groups() -> None:
    assert partition([{"params": []}], 10, lambda param: True) == []
