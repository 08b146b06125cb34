"""Differences between the weights found (in a store or checkpoint, say) and those that a model wants, by name. Does no I/O."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn

from deepnvme.model.structure import find_ties, weights_by_name
from deepnvme.telemetry.descriptions import shorten

_SHOWN = 8
"""Differences that a message lists."""


class WeightInfo(NamedTuple):
    """Dtype and shape of a weight."""

    dtype: torch.dtype
    """Dtype of the weight."""
    shape: tuple[int, ...]
    """Shape of the weight."""

    @classmethod
    def of(cls, weight: torch.Tensor) -> WeightInfo:
        """Return dtype and shape of a tensor."""
        return cls(weight.dtype, tuple(weight.shape))

    @property
    def nbytes(self) -> int:
        """Bytes of the weight, not quantised."""
        return math.prod(self.shape) * self.dtype.itemsize

    def named(self) -> tuple[str, tuple[int, ...]]:
        """Return the dtype's name without "torch.", and the shape."""
        return str(self.dtype).removeprefix("torch."), self.shape

    def __str__(self) -> str:
        dtype, shape = self.named()
        return f"{dtype} {list(shape)}"


class WeightMismatch(ValueError):
    """Raised if weights are not those of the model. The message counts the differences and lists the first 8.

    Args:
        what: Beginning of the message.
        differences: One line each, as :func:`differences` returns them.
    """

    def __init__(self, what: str, differences: Sequence[str]) -> None:
        plural = "s" if len(differences) > 1 else ""
        shown = shorten(differences, _SHOWN, "\n  ")
        super().__init__(f"{what}: {len(differences)} difference{plural}\n  {shown}")


def described(model: nn.Module) -> tuple[dict[str, WeightInfo], dict[str, str]]:
    """Return the dtype and shape of a model's weights by all of their names, and the model's ties.

    The ties map each further name of a tied weight to the weight's first name.
    """
    weights = weights_by_name(model)
    return {name: WeightInfo.of(weight) for name, weight in weights.items()}, find_ties(weights)


def differences(
    wanted: Mapping[str, WeightInfo],
    ties: Mapping[str, str],
    found: Mapping[str, WeightInfo],
    found_ties: Mapping[str, str],
    dtypes: bool = True,
) -> list[str]:
    """Return the differences between the weights found and those that a model wants, one line for each.

    A tied weight counts as found if one of its names is found.

    Args:
        wanted: The model's weights, by all of their names.
        ties: For each further name of a tied weight of the model, the first name.
        found: The weights found, by all of their names.
        found_ties: For each further name of a tied weight found, the first name.
        dtypes: Whether dtypes have to be equal, and weights that the model ties have to be tied.
    """
    names_of: dict[str, list[str]] = {name: [name] for name in wanted if name not in ties}
    for alias, first in ties.items():
        names_of[first].append(alias)
    said = []
    for names in names_of.values():
        there = [name for name in names if name in found]
        if not there:
            said.append(f"missing: {names[0]!r}, {wanted[names[0]]}")
            continue
        if len({found_ties.get(name, name) for name in there}) > 1 and dtypes:
            said.append(f"tied: {' and '.join(map(repr, there))} are one weight in the model, and were found to be several")
        expected, got = wanted[there[0]], found[there[0]]
        if expected.shape != got.shape:
            said.append(f"shape: {there[0]!r} should be {expected}, found {got}")
        elif dtypes and expected.dtype != got.dtype:
            said.append(f"dtype: {there[0]!r} should be {expected}, found {got}")
    said += [f"unexpected: {name!r}, {info}" for name, info in found.items() if name not in wanted]
    return said
