"""Weights that transformers merges of several tensors while it loads them: computed on places in files instead of tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from deepnvme.checkpoint.formats.elements import Elements
from deepnvme.checkpoint.weight_locations import Location
from deepnvme.memory.tensor_bytes import contiguous_strides
from deepnvme.model.weight_differences import WeightInfo

from .weights.places import MergedWeight, Place, Run, ScaledWeight


@dataclass(frozen=True)
class _Parts:
    """A tensor that is made of tensors in files."""

    shape: tuple[int, ...]
    parts: tuple[tuple[Location, tuple[int, ...], tuple[int, ...]], ...]
    """For each tensor: its place in a file; and in this tensor, the index of its first element and its shape."""


def merged(converter: Any, sources: Mapping[str, Sequence[Place]]) -> MergedWeight | ScaledWeight | None:
    """Return what a converter of transformers makes of tensors in files.

    Args:
        converter: A ``WeightConverter``.
        sources: The tensors by the converter's source patterns, in the order in which transformers loads them.

    Returns:
        The weight; None if the converter does more than stack and concatenate tensors, if the tensors do not lie in the weight
        as they do in their files, or if their dtypes differ.
    """
    scaled = {each.codes: each.parts for several in sources.values() for each in several if isinstance(each, ScaledWeight)}
    codes = {
        pattern: [each.codes if isinstance(each, ScaledWeight) else each for each in several]
        for pattern, several in sources.items()
    }
    weight = _merged(converter, codes)
    if weight is None or not scaled:
        return weight
    # All tensors have one dtype, so all have scales.
    parts_at = {(codes.path, codes.offset): parts for codes, parts in scaled.items() if isinstance(codes, Location)}
    parts = []
    for piece in weight.pieces:
        for part in parts_at.get((piece.path, piece.offset), ()):  # none for a piece without elements
            begin = piece.place // weight.info.dtype.itemsize + part.matrices.begin
            parts.append(part._replace(matrices=replace(part.matrices, begin=begin)))
    return ScaledWeight(weight, tuple(parts))


def _merged(converter: Any, sources: Mapping[str, Sequence[Place]]) -> MergedWeight | None:
    """Return what a converter makes of tensors without scales, as :func:`merged`."""
    from transformers.core_model_loading import Concatenate, MergeModulelist

    places = [each for several in sources.values() for each in several]
    dtypes = {each.info.dtype for each in places if isinstance(each, Location) and each.elements is None}
    if len(dtypes) != 1 or not all(isinstance(each, Location) and each.elements is None for each in places):
        return None
    values = {pattern: [_whole(each) for each in several if isinstance(each, Location)] for pattern, several in sources.items()}
    for operation in converter.operations:
        if type(operation) is MergeModulelist:
            values = {pattern: [_stack(several, operation.dim)] for pattern, several in values.items()}
        elif type(operation) is Concatenate:
            several = [each for pattern in converter.source_patterns for each in values.get(pattern, ())]
            values = {"": [_concatenate(several, operation.dim)]}
        else:
            return None
    results = [each for several in values.values() for each in several]
    return _weight(results[0], dtypes.pop()) if len(results) == len(converter.target_patterns) == 1 else None


def _whole(location: Location) -> _Parts:
    """Return a tensor in a file."""
    shape = location.info.shape
    return _Parts(shape, ((location, (0,) * len(shape), shape),))


def _stack(several: Sequence[_Parts], dim: int) -> _Parts:
    """Do what ``torch.stack`` does. Raises ValueError if the shapes differ."""
    return _concatenate([_unsqueezed(each, dim) for each in several], dim)


def _unsqueezed(tensor: _Parts, dim: int) -> _Parts:
    """Do what ``torch.unsqueeze`` does."""

    def inserted(numbers: tuple[int, ...], number: int) -> tuple[int, ...]:
        at = dim % (len(numbers) + 1)
        return (*numbers[:at], number, *numbers[at:])

    parts = ((place, inserted(first, 0), inserted(shape, 1)) for place, first, shape in tensor.parts)
    return _Parts(inserted(tensor.shape, 1), tuple(parts))


def _concatenate(several: Sequence[_Parts], dim: int) -> _Parts:
    """Do what ``torch.cat`` does. Raises ValueError if the other dimensions differ."""
    dim %= len(several[0].shape)
    others = {each.shape[:dim] + each.shape[dim + 1 :] for each in several}
    if len(others) != 1:
        raise ValueError(f"tensors of the shapes {sorted({each.shape for each in several})} cannot be merged along {dim}")
    parts = []
    end = 0
    for each in several:
        parts += [(place, (*first[:dim], first[dim] + end, *first[dim + 1 :]), shape) for place, first, shape in each.parts]
        end += each.shape[dim]
    return _Parts((*several[0].shape[:dim], end, *several[0].shape[dim + 1 :]), tuple(parts))


def _weight(tensor: _Parts, dtype: torch.dtype) -> MergedWeight | None:
    """Return the weight that a tensor is; None if one of its parts is not contiguous in it."""
    whole = Elements(0, dtype, tensor.shape, contiguous_strides(tensor.shape))
    pieces = []
    for place, first, shape in tensor.parts:
        part = whole.narrow(first, shape)
        if not part.contiguous:
            return None
        pieces.append(Run(place.path, place.offset, place.info.nbytes, part.offset))
    return MergedWeight(WeightInfo(dtype, tensor.shape), tuple(sorted(pieces, key=lambda piece: piece.place)))
