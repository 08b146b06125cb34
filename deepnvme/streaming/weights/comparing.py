"""Whether weights are those of a model: what differs, by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from deepnvme._listed import listed

from .blocks import ties_of, weights_of
from .manifest import WeightInfo

_SHOWN = 8


class StoreMismatch(ValueError):
    """Weights are those of another model, or of another version of it; the message names what differs, first things first."""

    def __init__(self, what: str, differences: Sequence[str]) -> None:
        plural = "s" if len(differences) > 1 else ""
        shown = listed(differences, _SHOWN, "\n  ")
        super().__init__(f"{what}: {len(differences)} difference{plural}\n  {shown}")


def described(model: nn.Module) -> tuple[dict[str, WeightInfo], dict[str, str]]:
    """A model's weights by all of their names, and the ties among these."""
    weights = weights_of(model)
    return {name: WeightInfo(weight.dtype, tuple(weight.shape)) for name, weight in weights.items()}, ties_of(weights)


def differences(
    wanted: Mapping[str, WeightInfo],
    ties: Mapping[str, str],
    found: Mapping[str, WeightInfo],
    found_ties: Mapping[str, str],
    dtypes: bool = True,
) -> list[str]:
    """Between what a model wants and what was found, each by all of its names. Where one name of a tied weight was found, all are
    there. ``dtypes``: whether they have to be the same."""
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
        for name in there[:1]:
            expected, got = wanted[name], found[name]
            if expected.shape != got.shape:
                said.append(f"shape: {name!r} should be {expected}, found {got}")
            elif dtypes and expected.dtype != got.dtype:
                said.append(f"dtype: {name!r} should be {expected}, found {got}")
    said += [f"unexpected: {name!r}, {info}" for name, info in found.items() if name not in wanted]
    return said
