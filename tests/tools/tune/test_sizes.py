"""Sizes as people type and read them."""

from __future__ import annotations

import argparse

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepnvme.tools.tune.command_line import size, size_text


@pytest.mark.parametrize("text", [
    "", " ", "0", "0K", "-1", "-1K", "+1", "1.5", "1e6", "K", "M1",
    "1M M", "1MM", "1X", "1iB", "0x10", "1_000", "٣", "1\u212a", "nan", "1M2",
])  # fmt: skip
def test_what_is_not_a_size_is_refused_and_shown(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="must be a size such as") as caught:
        size(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(("text", "nbytes"), [
    ("1", 1), ("511", 511), ("4097", 4097), (" 4096 ", 4096), ("007", 7),
    ("1K", 1 << 10), ("128K", 128 << 10), ("400M", 400 << 20), ("1G", 1 << 30), ("2T", 2 << 40),
    ("64k", 64 << 10), ("64KiB", 64 << 10), ("1 M", 1 << 20), ("1.5M", 3 << 19), ("8b", 8), ("64KB", 64_000),
])  # fmt: skip
def test_suffixes_are_powers_of_1024_unless_they_have_a_b(text: str, nbytes: int) -> None:
    assert size(text) == nbytes


@given(st.integers(min_value=1, max_value=1 << 60))
def test_a_size_reads_back_as_it_was_written(nbytes: int) -> None:
    assert size(size_text(nbytes)) == size(str(nbytes)) == nbytes


@pytest.mark.parametrize(("nbytes", "text"), [
    (0, "0"), (1023, "1023"), (1 << 10, "1K"), (1536, "1536"),
    (1536 << 10, "1536K"), (400 << 20, "400M"), (1 << 30, "1G"), (3 << 40, "3T"),
])  # fmt: skip
def test_sizes_are_written_with_the_largest_suffix_that_is_exact(nbytes: int, text: str) -> None:
    assert size_text(nbytes) == text
