"""What follows what: repeated sequences are predicted from the second on."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepnvme.streaming.access_predictor import AccessPredictor


def ahead(order: AccessPredictor, count: int) -> str:
    return "".join(itertools.islice(order.predict(), count))


def noted(order: AccessPredictor, keys: str) -> AccessPredictor:
    for key in keys:
        order.note(key)
    return order


def test_nothing_known_predicts_nothing() -> None:
    assert ahead(AccessPredictor(()), 5) == ""
    assert ahead(noted(AccessPredictor(()), "a"), 5) == ""


def test_the_first_pass_is_taken_to_go_as_it_was_given_and_to_be_repeated() -> None:
    order = AccessPredictor("abcd")
    assert ahead(order, 6) == "abcdab"
    assert ahead(noted(order, "ab"), 4) == "cdab"


@pytest.mark.parametrize(
    ("passes", "last", "following"),
    [
        ("abc" * 2, "a", "bcabc"),
        ("abac" * 2, "ab", "acabac"),  # shared by two places
        ("sasbsc" * 2, "sas", "bscsas"),  # between all others
        ("aab" * 2, "a", "abaab"),  # twice in a row
        ("acb" * 2, "ac", "bacb"),  # not as given
        ("ab" + "cd" * 5, "c", "dcdcd"),  # an encoder once, a decoder many times
    ],
)
def test_what_was_seen_is_continued(passes: str, last: str, following: str) -> None:
    assert ahead(noted(AccessPredictor("abcds"), passes + last), len(following)) == following


def test_what_is_skipped_once_is_expected_to_be_skipped_again() -> None:
    assert ahead(noted(AccessPredictor("abcd"), "abcd" + "acd" + "a"), 3) == "cda"


def test_a_sequence_that_was_broken_off_teaches_nothing() -> None:
    order = noted(AccessPredictor("abcd"), "abcd" + "ab")
    order.forget_last()
    noted(order, "ab")
    assert ahead(order, 4) == "cdab"


@given(st.lists(st.sampled_from("abcdef"), min_size=1, unique=True), st.text("abcdef", max_size=20))
def test_any_pass_without_repetition_is_predicted_once_it_came_often_enough(once: list[str], before: str) -> None:
    order = noted(AccessPredictor("abcdef"), before + "".join(once) * 3)
    for key in once:
        assert ahead(order, 1) == key
        order.note(key)


@given(st.lists(st.sampled_from("abcd"), min_size=1), st.text("abcde", max_size=30))
def test_predictions_are_of_what_is_known(given_first: list[str], keys: str) -> None:
    assert set(ahead(noted(AccessPredictor(given_first), keys), 50)) <= set(given_first) | set(keys)
