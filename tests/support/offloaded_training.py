"""The model of an OffloadedTraining, as it is on the drive, and how it is compared."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from deepnvme.offload import OffloadedTraining


def state_of(training: OffloadedTraining) -> dict[str, torch.Tensor]:
    """Return a copy of the model's state."""
    return {name: value.clone() for name, value in training.state_dict()["model"].items()}


def same_values(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether all values are the same. NaN is NaN: a training may diverge, and has to in the same way."""
    return one.shape == other.shape and bool(((one == other) | (one.isnan() & other.isnan())).all())


def assert_same_values(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    """Of the states of two models: the same names in the same order, dtypes and values."""
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert same_values(found[name], value), name


def assert_same_model(training: OffloadedTraining, expected: nn.Module) -> None:
    """The model on the drive has the values of one in memory."""
    assert_same_values(training.state_dict()["model"], expected.state_dict())
