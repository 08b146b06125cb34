"""Space in a file, and shares of a tensor: pure decisions."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepnvme.memory.alignment import ALIGNMENT, padded
from deepnvme.store.allocator import emptiest, shares
from deepnvme.store.extents import ExtentMap

A = ALIGNMENT


def taken(*lengths: int) -> ExtentMap:
    extents = ExtentMap()
    for length in lengths:
        extents.take(length)
    return extents


@pytest.mark.parametrize(("nbytes", "expected"), [(1, A), (A - 1, A), (A, A), (A + 1, 2 * A), (0, 0), (10 * A, 10 * A)])
def test_an_extent_holds_whole_pages(nbytes, expected):
    assert padded(nbytes) == expected


@pytest.mark.parametrize(("nbytes", "alignment", "expected"), [(0, 64, 0), (1, 64, 64), (64, 64, 64), (65, 64, 128), (7, 3, 9)])
def test_other_alignments_are_rounded_up_to_alike(nbytes, alignment, expected):
    assert padded(nbytes, alignment) == expected


def test_the_first_extents_follow_each_other():
    extents = ExtentMap()
    assert [extents.take(A), extents.take(3 * A), extents.take(A)] == [0, A, 4 * A]
    assert (extents.end, extents.used, extents.holes()) == (5 * A, 5 * A, [])


def test_the_hole_that_fits_best_is_taken():
    extents = taken(4 * A, A, 2 * A, A, 3 * A, A)
    for offset, length in ((0, 4 * A), (5 * A, 2 * A), (8 * A, 3 * A)):
        extents.give_back(offset, length)
    assert extents.take(2 * A) == 5 * A
    assert extents.take(2 * A) == 8 * A
    assert extents.holes() == [(0, 4 * A), (10 * A, A)]


def test_neighbouring_holes_are_one():
    extents = taken(A, A, A, A)
    extents.give_back(0, A)
    extents.give_back(2 * A, A)
    extents.give_back(A, A)
    assert extents.holes() == [(0, 3 * A)]


def test_what_is_freed_at_the_end_shortens_the_file():
    extents = taken(A, A, A)
    extents.give_back(A, A)
    extents.give_back(2 * A, A)
    assert (extents.end, extents.holes()) == (A, [])
    extents.give_back(0, A)
    assert extents.end == 0


def test_a_run_lies_side_by_side_past_the_end_when_no_hole_holds_it():
    extents = taken(*[A] * 10)
    extents.give_back(2 * A, A)
    assert extents.take_run([A, 2 * A]) == [10 * A, 11 * A]


def test_a_run_takes_a_hole_that_holds_all_of_it():
    extents = taken(*[A] * 10)
    extents.give_back(2 * A, 4 * A)
    assert extents.take_run([A, 2 * A]) == [2 * A, 3 * A]


def test_a_run_fills_the_holes_of_a_file_that_is_full_of_them():
    extents = taken(*[A] * 10)
    for index in range(0, 10, 2):
        extents.give_back(index * A, A)
    offsets = extents.take_run([A, A, 2 * A])
    assert offsets == [0, 2 * A, 10 * A]


def test_bytes_that_are_asked_for_by_their_place():
    extents = ExtentMap()
    extents.take_at(3 * A, A)
    assert extents.holes() == [(0, 3 * A)]
    extents.take_at(A, A)
    assert extents.holes() == [(0, A), (2 * A, A)]


@pytest.mark.parametrize(("offset", "length"), [(0, A), (A, A), (0, 3 * A), (3 * A, 2 * A), (-A, A), (1, A)])
def test_a_place_that_is_taken_at_least_in_part_is_refused(offset, length):
    extents = taken(A, A, A, A)
    extents.give_back(2 * A, A)
    before = extents.holes(), extents.end
    with pytest.raises(ValueError, match=str(abs(offset))):
        extents.take_at(offset, length)
    assert (extents.holes(), extents.end) == before


@pytest.mark.parametrize(("offset", "length"), [(A, A), (A, 2 * A), (0, 2 * A), (3 * A, A), (2 * A, 2 * A), (-A, A), (1, A)])
def test_to_free_what_is_free_is_refused(offset, length):
    extents = taken(A, A, A)
    extents.give_back(A, A)
    before = extents.holes(), extents.end
    with pytest.raises(ValueError, match="not taken"):
        extents.give_back(offset, length)
    assert (extents.holes(), extents.end) == before


@pytest.mark.parametrize("length", [0, -A, 1, A + 1])
def test_a_length_that_is_no_multiple_is_refused(length):
    with pytest.raises(ValueError, match=str(length)):
        ExtentMap().take(length)
    with pytest.raises(ValueError, match=str(length)):
        ExtentMap().take_run([A, length, length])


@settings(deadline=None)
@given(st.data())
def test_no_byte_is_ever_taken_twice_and_none_is_lost(data):
    extents = ExtentMap()
    held: dict[int, int] = {}
    for _ in range(data.draw(st.integers(0, 40))):
        if held and data.draw(st.booleans()):
            offset = data.draw(st.sampled_from(sorted(held)))
            extents.give_back(offset, held.pop(offset))
        else:
            lengths = [count * A for count in data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))]
            for offset, length in zip(extents.take_run(lengths), lengths, strict=True):
                assert offset not in held
                held[offset] = length
        spans = sorted([*held.items(), *extents.holes()])
        # Taken extents and holes tile the file from its start to its end.
        assert all(offset + length == following for (offset, length), (following, _) in itertools.pairwise(spans))
        assert (spans[0][0] if spans else 0, sum(length for _, length in spans)) == (0, extents.end)
        assert extents.used == sum(held.values())
        holes = extents.holes()
        assert all(offset + length < following for (offset, length), (following, _) in itertools.pairwise(holes))
        assert not holes or sum(holes[-1]) < extents.end
    for offset, length in held.items():
        extents.give_back(offset, length)
    assert (extents.end, extents.holes(), extents.used) == (0, [], 0)


@given(st.integers(0, 1 << 40), st.lists(st.floats(0.01, 100), min_size=1, max_size=5))
def test_shares_are_in_proportion_and_end_at_pages(nbytes, weights):
    parts = shares(nbytes, weights)
    assert sum(parts) == nbytes
    assert len(parts) == len(weights)
    held = [part for part in parts if part]
    assert all(part > 0 and part % A == 0 for part in held[:-1])
    assert all(part >= 0 for part in parts)
    for part, weight in zip(parts, weights, strict=True):
        assert abs(part - nbytes * (weight / sum(weights))) <= A + nbytes * 1e-9


def test_the_directory_that_holds_least_for_its_weight_is_next():
    assert emptiest([0, 0], [1, 1]) == 0
    assert emptiest([2, 1], [1, 1]) == 1
    assert emptiest([4, 3], [2, 1]) == 0
