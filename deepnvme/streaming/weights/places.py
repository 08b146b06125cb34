"""Where the weights of a model lie in the files of a checkpoint."""

from __future__ import annotations

from typing import NamedTuple

import torch

from deepnvme.checkpoint.weight_locations import Location
from deepnvme.model.fp8 import ScaledMatrices
from deepnvme.model.weight_differences import WeightInfo


class Run(NamedTuple):
    """Bytes of a file that are read at once: neighbouring weights, widened to whole pages; or a piece of a merged weight."""

    path: str
    """Path of the file."""
    offset: int
    """Where the run begins in the file, in bytes."""
    nbytes: int
    """Bytes of the run."""
    place: int
    """Where the run begins in the extent, or the piece in its weight, in bytes."""


class MergedWeight(NamedTuple):
    """A weight that is several tensors in files, which follow one another in memory."""

    info: WeightInfo
    """Shape of the weight, and the dtype of all its pieces."""
    pieces: tuple[Run, ...]
    """The pieces. Their places, from the start of the weight, cover it without gaps."""


class ScaledPart(NamedTuple):
    """A part of an FP8 weight, and its scales."""

    matrices: ScaledMatrices
    """The part."""
    scales: Location
    """Where the scales are."""


class ScaledWeight(NamedTuple):
    """A weight in FP8, whose scales are other tensors of the checkpoint."""

    codes: Location | MergedWeight
    """Where the FP8 values are."""
    parts: tuple[ScaledPart, ...]
    """Parts of the weight in the order of their values: one for each piece of a merged weight."""

    @property
    def info(self) -> WeightInfo:
        """Shape of the weight, and its dtype in the files."""
        return self.codes.info


Place = torch.Tensor | Location | MergedWeight | ScaledWeight
"""Where a weight lies. A tensor stands only for a weight without elements."""


def paths_of(place: Place) -> set[str]:
    """Return the files that have the bytes of a weight."""
    if isinstance(place, torch.Tensor):
        return set()
    if isinstance(place, Location):
        return {place.path}
    if isinstance(place, MergedWeight):
        return {piece.path for piece in place.pieces}
    return paths_of(place.codes) | {part.scales.path for part in place.parts}
