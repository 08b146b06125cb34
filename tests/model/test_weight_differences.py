"""Differences between a model's weights and others, by name."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from deepnvme.model.weight_differences import WeightInfo, WeightMismatch, described, differences

F32 = WeightInfo(torch.float32, (2, 3))
BF16 = WeightInfo(torch.bfloat16, (2, 3))
LONG = WeightInfo(torch.float32, (9,))


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ({}, ["missing: 'a', float32 [2, 3]"]),
        ({"a": LONG}, ["shape: 'a' should be float32 [2, 3], found float32 [9]"]),
        ({"a": BF16}, ["dtype: 'a' should be float32 [2, 3], found bfloat16 [2, 3]"]),
        ({"a": F32, "b": LONG}, ["unexpected: 'b', float32 [9]"]),
        ({"a": F32}, []),
    ],
)
def test_each_kind_of_difference_is_told(found: dict[str, WeightInfo], said: list[str]) -> None:
    assert differences({"a": F32}, {}, found, {}) == said


def test_dtypes_may_differ_where_they_are_to_be_converted() -> None:
    assert differences({"a": F32}, {}, {"a": BF16}, {}, dtypes=False) == []
    assert len(differences({"a": F32}, {}, {"a": LONG}, {}, dtypes=False)) == 1


def test_one_name_of_a_tied_weight_is_enough() -> None:
    wanted = {"a": F32, "b": F32}
    for name in wanted:
        assert differences(wanted, {"b": "a"}, {name: F32}, {}) == []
    assert differences(wanted, {"b": "a"}, {}, {}) == ["missing: 'a', float32 [2, 3]"]


def test_what_the_model_ties_and_others_have_not() -> None:
    both = {"a": F32, "b": F32}
    assert differences(both, {"b": "a"}, both, {}) == [
        "tied: 'a' and 'b' are one weight in the model, and were found to be several"
    ]
    assert differences(both, {"b": "a"}, both, {"b": "a"}) == []
    assert differences(both, {"b": "a"}, both, {"a": "b"}) == [], "whichever is the first"
    assert differences(both, {}, both, {"b": "a"}) == [], "of no harm"


def test_a_module_is_described_with_all_names_of_its_weights() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 2, bias=False), nn.Linear(3, 2, bias=False), nn.BatchNorm1d(2))
    model[1].weight = model[0].weight
    wanted, ties = described(model)
    assert list(wanted) == ["0.weight", "1.weight", "2.weight", "2.bias", *(f"2.{name}" for name in model[2]._buffers)]
    assert wanted["0.weight"] == F32
    assert wanted["2.num_batches_tracked"] == WeightInfo(torch.int64, ())
    assert ties == {"1.weight": "0.weight"}


def test_the_first_of_many_are_shown() -> None:
    assert str(WeightMismatch("another", ["one"])) == "another: 1 difference\n  one"
    lines = str(WeightMismatch("another", [f"number {index}" for index in range(20)])).splitlines()
    assert lines[0] == "another: 20 differences"
    assert lines[1:3] == ["  number 0", "  number 1"]
    assert lines[-1] == "  and 12 more"
