"""Where the weights of each expert of a mixture lie in the files of a checkpoint. Reads only headers, not the weights."""

from __future__ import annotations

import bisect
import itertools
import os
import sys
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeAlias

import torch
from torch import nn

from deepnvme.checkpoint.file_io import Version, file_version
from deepnvme.checkpoint.formats.pt_records import CorruptCheckpoint
from deepnvme.checkpoint.weight_locations import Location
from deepnvme.memory.alignment import PAGE, padded
from deepnvme.model.fp8 import dequantize_matrices, float32_scales
from deepnvme.model.structure import weights_by_name
from deepnvme.model.weight_differences import WeightInfo, WeightMismatch
from deepnvme.streaming.located_weights import renamed
from deepnvme.streaming.weights.checkpoint_weights import located_in
from deepnvme.streaming.weights.places import MergedWeight, Place, ScaledPart, ScaledWeight, paths_of

Checkpoint: TypeAlias = str | os.PathLike[str] | Mapping[str, Place]
"""Path of a checkpoint, as for :func:`weights_in`, or the places of weights by their names in the model."""


_ALLOCATED = 64
"""Bytes. torch allocates tensors on the CPU at multiples of this."""


class FileRange(NamedTuple):
    """A range of bytes in a file."""

    path: str
    """Path of the file."""
    offset: int
    """Bytes from the start of the file."""
    nbytes: int
    """Bytes of the range; more than 0."""


class ExpertSlice(NamedTuple):
    """One expert's part of a weight: ranges of files whose bytes follow one another in memory."""

    weight: str
    """Name of the weight in the model."""
    expert: int
    """Number of the expert in its layer."""
    info: WeightInfo
    """Dtype and shape of the part in the files."""
    ranges: tuple[FileRange, ...]
    """The ranges. Neighbours in a file are one range."""
    merged: bool = False
    """Whether transformers makes the weight of several tensors, in memory of its own, while it loads it."""
    scaled: tuple[ScaledPart, ...] = ()
    """The scales of an FP8 part. They are read behind it, and it is dequantised for each use: in memory it has half the bytes."""
    dtype: torch.dtype | None = None
    """Dtype of the values of an FP8 part."""

    @property
    def start(self) -> int:
        """Offset of the first byte in the memory that the part is read into.

        It is chosen so that whole pages of the file are read into whole pages of memory, wherever the part begins in the file.
        """
        offset = self.ranges[0].offset
        return 0 if offset % self.info.dtype.itemsize else offset % PAGE

    @property
    def memory_nbytes(self) -> int:
        """Bytes of memory, beginning at a page, that the part is read into, and its scales behind it."""
        return padded(self.scales_start + sum(each.nbytes for each in self.scale_ranges))

    @property
    def scales_start(self) -> int:
        """Offset of the scales in the memory that the part is read into."""
        return padded(self.start + self.info.nbytes)

    @property
    def scale_ranges(self) -> tuple[FileRange, ...]:
        """Where the scales of an FP8 part lie in the files; empty for other parts."""
        return tuple(FileRange(scales.path, scales.offset, scales.info.nbytes) for _, scales in self.scaled)

    @property
    def place(self) -> int:
        """Offset of the first byte in the memory when the part is used.

        torch's kernels give other last bits for other alignments. In memory, a weight is a view of the mapped file, which has
        the alignment of the file, or a tensor that transformers has merged, which is aligned as torch allocates memory.
        """
        return self.start // _ALLOCATED * _ALLOCATED if self.merged else self.start

    def view(self, memory: torch.Tensor) -> torch.Tensor:
        """Return the part as a view of its memory, at :attr:`place`; of an FP8 part the values, in memory of their own."""
        stored = memory[self.place : self.place + self.info.nbytes]
        if not self.scaled:
            return stored.view(self.info.dtype).view(self.info.shape)
        parts = []
        at = self.scales_start
        for matrices, scales in self.scaled:
            there = memory[at : at + scales.info.nbytes].clone()
            parts.append((matrices, float32_scales(there.view(scales.info.dtype))))
            at += scales.info.nbytes
        values = torch.empty(self.info.shape, dtype=self.dtype)
        dequantize_matrices(stored, parts, values)
        return values

    def __str__(self) -> str:
        layer, _, weight = self.weight.rpartition(".")
        return f"expert {self.expert} of {layer!r} ({weight})"


def slices_in(model: nn.Module, places: Mapping[str, Place], weights: Mapping[str, int | None]) -> dict[str, list[ExpertSlice]]:
    """Return where the experts' parts of weights lie, by the weight's name in the model.

    A packed weight has all experts of its layer along its first dimension. The files may have it packed too, or a tensor for
    each expert, or several that transformers concatenates (gate and up).

    Args:
        model: The model; it may be on the meta device.
        places: Where the weights of the model lie, by their names in the model.
        weights: Names of the weights, each with the number of the only expert that it belongs to, or None for a packed weight.

    Returns:
        For each packed weight a part for each expert, in their order; for another weight one part.

    Raises:
        WeightMismatch: If the checkpoint lacks a weight, or has it in another shape.
        ValueError: If transformers rearranges a weight while loading it, or if a weight is quantised other than to FP8 with
            scales, or its tensors in the files are not ranges of bytes.
        CorruptCheckpoint: If a part ends past the end of its file.
    """
    own = weights_by_name(model)
    differences = []
    slices: dict[str, list[ExpertSlice]] = {}
    for name, number in weights.items():
        wanted, place = WeightInfo.of(own[name]), places.get(name)
        if place is None:
            differences.append(f"missing: {name!r}, {wanted}")
        elif tuple(wanted.shape) != (info := _info(name, place)).shape:
            differences.append(f"shape: {name!r} should be {wanted}, found {info}")
        else:
            count, *shape = wanted.shape if number is None else (1, *wanted.shape)
            part, merged = WeightInfo(info.dtype, tuple(shape)), isinstance(place, MergedWeight)
            slices[name] = []
            for index in range(count):
                first, expert = index * part.nbytes, index if number is None else number
                if isinstance(place, ScaledWeight):
                    ranges, scales = _cut(place.codes, first, part.nbytes), _cut_scales(place, first, part.nbytes)
                    slices[name].append(ExpertSlice(name, expert, part, ranges, scaled=scales, dtype=wanted.dtype))
                else:
                    slices[name].append(ExpertSlice(name, expert, part, _cut(place, first, part.nbytes), merged))
    if differences:
        raise WeightMismatch("the experts of the checkpoint are not those of the model", differences)
    _check_within_files(slices)
    return slices


def places_in(
    model: nn.Module, checkpoint: Checkpoint, names: Container[str]
) -> tuple[Mapping[str, Place], Mapping[str, Version]]:
    """Return where weights of a model lie in a checkpoint, by their names in the model; and the version of each file, by path.

    A model of transformers gets the names and conversions with which transformers loads it; others have the checkpoint's names.
    Versions are from before the headers were read; those of a mapping from now.

    Args:
        model: The model.
        checkpoint: The checkpoint.
        names: Names of the weights; others may be left out.

    Raises:
        ValueError: If transformers rearranges a weight while loading it.
        Exception: Any error of :func:`weights_in`.
    """
    if isinstance(checkpoint, Mapping):
        return checkpoint, {
            path: file_version(path) for name in checkpoint if name in names for path in paths_of(checkpoint[name])
        }
    found, versions = located_in(checkpoint, model)
    transformers = sys.modules.get("transformers")
    if transformers is None or not isinstance(model, transformers.PreTrainedModel):
        return found, versions
    from transformers.conversion_mapping import get_model_conversion_mapping

    places, _ = renamed(model, found, get_model_conversion_mapping(model), only=names)
    return places, versions


_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
"""Dtypes of tensors that are weights by themselves. Others, such as float8, have scales."""


def _info(name: str, place: Place) -> WeightInfo:
    """Return dtype and shape of a weight. Raises ValueError unless it is ranges of bytes in files, of floating-point values."""
    if isinstance(place, ScaledWeight):
        return place.info
    spread = isinstance(place, Location) and place.elements is not None
    if isinstance(place, torch.Tensor) or not place.info.nbytes or spread:
        raise ValueError(f"{name!r} is not one range of bytes in a file, as an expert's weight has to be: save it contiguously")
    if place.info.dtype not in _DTYPES:
        raise ValueError(f"{name!r} is {place.info} in the checkpoint: of quantised experts, those in FP8 are read on demand")
    return place.info


def _cut(place: Place, begin: int, nbytes: int) -> tuple[FileRange, ...]:
    """Return the ranges of ``nbytes`` bytes of a weight, from its byte ``begin`` on. Neighbours in a file become one range."""
    if isinstance(place, Location):
        return (FileRange(place.path, place.offset + begin, nbytes),)
    assert isinstance(place, MergedWeight)
    ranges: list[FileRange] = []
    first = bisect.bisect_right(place.pieces, begin, key=lambda piece: piece.place) - 1
    for path, offset, size, at in itertools.islice(place.pieces, first, None):
        low, high = max(at, begin), min(at + size, begin + nbytes)
        if low >= high:
            break
        last = ranges[-1] if ranges else None
        if last is not None and (last.path, last.offset + last.nbytes) == (path, offset + low - at):
            ranges[-1] = last._replace(nbytes=last.nbytes + high - low)
        else:
            ranges.append(FileRange(path, offset + low - at, high - low))
    return tuple(ranges)


def _cut_scales(place: ScaledWeight, begin: int, nbytes: int) -> tuple[ScaledPart, ...]:
    """Return the scales of ``nbytes`` bytes of an FP8 weight, from its byte ``begin`` on, by their parts.

    Raises ValueError if some scale is one of these bytes and of others, too.
    """
    found = []
    for matrices, scales in place.parts:
        low, high = max(matrices.begin, begin), min(matrices.begin + matrices.numel, begin + nbytes)
        if low >= high:
            continue
        part = matrices.narrow(low, high - low)
        _, rows, columns = part.grid
        shape = (part.count, rows, columns)
        offset = (low - matrices.begin) // (part.rows * part.columns) * rows * columns * scales.info.dtype.itemsize
        there = Location(scales.path, scales.offset + offset, WeightInfo(scales.info.dtype, shape))
        found.append(ScaledPart(replace(part, begin=low - begin), there))
    return tuple(found)


def _check_within_files(slices: Mapping[str, Sequence[ExpertSlice]]) -> None:
    """Raise CorruptCheckpoint if a part ends past the end of its file."""
    sizes: dict[str, int] = {}
    for each in itertools.chain.from_iterable(slices.values()):
        for path, offset, nbytes in (*each.ranges, *each.scale_ranges):
            size = sizes.setdefault(path, -1)
            if size < 0:
                size = sizes[path] = os.stat(path).st_size
            if offset + nbytes > size:
                raise CorruptCheckpoint(path, f"{each} is said to end at byte {offset + nbytes}, and the file has {size} bytes")
