"""Long lists end in a number."""

from __future__ import annotations

from deepnvme._shortened_lists import listed


def test_as_many_as_wanted_and_the_number_of_the_others() -> None:
    assert listed([]) == ""
    assert listed("abcd") == "a, b, c, d"
    assert listed("abcdef") == "a, b, c, d, and 2 more"
    assert listed(iter("abc"), 1, "\n  ") == "a\n  and 2 more"
