"""Space in a file, and shares of a tensor: pure decisions."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepnvme.memory.alignment import ALIGNMENT
from deepnvme.store.allocator import shares
from deepnvme.store.extents import ExtentMap

A = ALIGNMENT


def taken(*lengths: int) -> ExtentMap:
    extents = ExtentMap()
    for length in lengths:
        extents.take(length)
    return extents


def test_the_hole_that_fits_best_is_taken():
    extents = taken(4 * A, A, 2 * A, A, 3 * A, A)
    for offset, length in ((0, 4 * A), (5 * A, 2 * A), (8 * A, 3 * A)):
        extents.give_back(offset, length)
    assert extents.take(2 * A) == 5 * A
    assert extents.take(2 * A) == 8 * A
    assert extents.holes() == [(0, 4 * A), (10 * A, A)]


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
            for offset, length in [(extents.take(length), length) for length in lengths]:
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


@given(st.integers(0, 1 << 40), st.integers(1, 5))
def test_shares_are_nearly_equal_and_end_at_pages(nbytes, count):
    parts = shares(nbytes, count)
    assert sum(parts) == nbytes
    assert len(parts) == count
    assert all(part % A == 0 for part in parts[: max((index for index, part in enumerate(parts) if part), default=0)])
    assert all(abs(part - nbytes / count) <= A for part in parts)
