"""Where the weights of each expert of a mixture lie in the files of a checkpoint. Reads only headers, not the weights."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import nn

from deepnvme.checkpoint.formats.pt_records import CorruptCheckpoint
from deepnvme.checkpoint.weight_locations import Location, part_of, weights_in
from deepnvme.memory.alignment import PAGE, padded
from deepnvme.model.structure import weights_by_name
from deepnvme.model.weight_differences import WeightInfo, WeightMismatch

Checkpoint: TypeAlias = str | os.PathLike[str] | Mapping[str, torch.Tensor | Location]
"""Path of a checkpoint, as for :func:`weights_in`, or the place of each of its weights by name."""


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

    @property
    def start(self) -> int:
        """Offset of the first byte in the memory that the part is read into.

        It is chosen so that whole pages of the file are read into whole pages of memory, wherever the part begins in the file.
        """
        offset = self.ranges[0].offset
        return 0 if offset % self.info.dtype.itemsize else offset % PAGE

    @property
    def memory_nbytes(self) -> int:
        """Bytes of memory, beginning at a page, that the part is read into."""
        return padded(self.start + self.info.nbytes)

    @property
    def place(self) -> int:
        """Offset of the first byte in the memory when the part is used.

        torch's kernels give other last bits for other alignments. In memory, a weight is a view of the mapped file, which has
        the alignment of the file, or a tensor that transformers has merged, which is aligned as torch allocates memory.
        """
        return self.start // _ALLOCATED * _ALLOCATED if self.merged else self.start

    def view(self, memory: torch.Tensor) -> torch.Tensor:
        """Return the part as a view of its memory, at :attr:`place`."""
        return memory[self.place : self.place + self.info.nbytes].view(self.info.dtype).view(self.info.shape)

    def __str__(self) -> str:
        layer, _, weight = self.weight.rpartition(".")
        return f"expert {self.expert} of {layer!r} ({weight})"


def slices_in(model: nn.Module, checkpoint: Checkpoint, weights: Mapping[str, int | None]) -> dict[str, list[ExpertSlice]]:
    """Return where the experts' parts of weights lie, by the weight's name in the model.

    A packed weight has all experts of its layer along its first dimension. The files may have it packed too, or a tensor for
    each expert, or several that transformers concatenates (gate and up).

    Args:
        model: The model; it may be on the meta device.
        checkpoint: The checkpoint.
        weights: Names of the weights, each with the number of the only expert that it belongs to, or None for a packed weight.

    Returns:
        For each packed weight a part for each expert, in their order; for another weight one part.

    Raises:
        WeightMismatch: If the checkpoint lacks a weight, or has it in another shape.
        ValueError: If transformers converts a weight by more than stacking and concatenating, or if a tensor is not one range of
            bytes in a file.
        CorruptCheckpoint: If a part ends past the end of its file.
        Exception: Any error of :func:`weights_in`.
    """
    own = {name: weight for name, weight in weights_by_name(model).items() if name in weights}
    found = checkpoint if isinstance(checkpoint, Mapping) else weights_in(checkpoint)
    origins = origins_of(model, found)
    slices: dict[str, list[ExpertSlice]] = {}
    differences: list[str] = []
    for name, expert in weights.items():
        if name not in origins:
            differences.append(f"missing: {name!r}, {WeightInfo.of(own[name])}")
            continue
        parts = _parts(name, origins[name], expert is None, found)
        slices[name] = [
            _slice(name, number if expert is None else expert, each, bool(origins[name].steps))
            for number, each in enumerate(parts)
        ]
        count, *shape = own[name].shape if expert is None else (1, *own[name].shape)
        if len(parts) != count:
            differences.append(f"experts: {name!r} should have {count}, found {len(parts)}")
        differences += [
            f"shape: {each} should have {shape}, found {each.info}" for each in slices[name] if each.info.shape != tuple(shape)
        ]
    if differences:
        raise WeightMismatch("the experts of the checkpoint are not those of the model", differences)
    _check_within_files(slices)
    return slices


class Origin(NamedTuple):
    """The tensors of a checkpoint that a weight of a model is made of."""

    names: tuple[tuple[str, ...], ...]
    """Names of the tensors, grouped by the pattern that they match in transformers' conversion. Within a group, in the order of
    the experts."""
    steps: tuple[tuple[str, int | None], ...] = ()
    """The operations that transformers applies to the groups, each with its dimension. Empty for a tensor that is the weight."""


def origins_of(model: nn.Module, names: Iterable[str]) -> dict[str, Origin]:
    """Return which tensors of a checkpoint each weight of a model is made of, by the weight's name.

    Names and conversions of a model of transformers are those with which transformers loads it. Other models have the names of
    the checkpoint.
    """
    transformers = sys.modules.get("transformers")
    if transformers is None or not isinstance(model, transformers.PreTrainedModel):
        return {name: Origin(((name,),)) for name in names}
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    mapping = get_model_conversion_mapping(model)
    renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
    converters = [each for each in mapping if isinstance(each, WeightConverter)]
    converter_of = {pattern: each for each in converters for pattern in each.source_patterns}
    own = weights_by_name(model)
    collected: dict[str, dict[str | None, list[str]]] = {}
    for name in sorted(names, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, own)
        if target not in own and name in own:
            target, pattern = name, None
        collected.setdefault(target, {}).setdefault(pattern, []).append(name)
    origins: dict[str, Origin] = {}
    for target, by_pattern in collected.items():
        converter = converter_of.get(next(iter(by_pattern)) or "")
        if converter is None:
            origins[target] = Origin((tuple(by_pattern[None]),))
        else:
            groups = tuple(tuple(by_pattern.get(pattern, ())) for pattern in converter.source_patterns)
            steps = tuple((type(each).__name__, getattr(each, "dim", None)) for each in converter.operations)
            origins[target] = Origin(groups, steps)
    return origins


def _parts(name: str, origin: Origin, packed: bool, found: Mapping[str, torch.Tensor | Location]) -> list[list[Location]]:
    """Return for each expert the places of the tensors, or of the part of one, that form its weight when concatenated."""
    places = [[_contiguous(each, found[each]) for each in names] for names in origin.names]
    if origin.steps in _STACKED:
        return [list(parts) for parts in zip(*places)]  # noqa: B905  # the caller compares the number of experts
    if origin.steps:
        steps = ", ".join(step for step, _ in origin.steps)
        raise ValueError(f"transformers converts {name!r} while loading ({steps}), and experts are read as the files have them")
    (whole,) = places[0]
    if not packed:
        return [[whole]]
    count, *shape = whole.info.shape
    cuts = [part_of(whole, [slice(expert, expert + 1)] + [slice(None)] * len(shape)) for expert in range(count)]
    return [[_contiguous(name, cut)._replace(info=WeightInfo(whole.info.dtype, tuple(shape)))] for cut in cuts]


_STACKED = ((("MergeModulelist", 0),), (("MergeModulelist", 0), ("Concatenate", 1)))
"""Conversions of transformers that leave the bytes of each expert's tensors as they are."""
_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
"""Dtypes of tensors that are weights by themselves. Others, such as float8, have scales."""


def _contiguous(name: str, place: torch.Tensor | Location) -> Location:
    """Return the place of a tensor. Raises ValueError unless it is one range of bytes in a file, of floating-point values."""
    if not isinstance(place, Location) or place.elements is not None or not (place.info.nbytes and place.info.shape):
        raise ValueError(f"{name!r} is not one range of bytes in a file, as an expert's weight has to be: save it contiguously")
    if place.info.dtype not in _DTYPES:
        raise ValueError(f"{name!r} is {place.info} in '{place.path}': quantised experts are not read on demand")
    return place


def _slice(name: str, expert: int, parts: Sequence[Location], merged: bool) -> ExpertSlice:
    """Return an expert's part of a weight: ``parts`` concatenated. Its shape is () if they do not fit together."""
    ranges: list[FileRange] = []
    for part in parts:
        last = ranges[-1] if ranges else None
        if last is not None and (last.path, last.offset + last.nbytes) == (part.path, part.offset):
            ranges[-1] = last._replace(nbytes=last.nbytes + part.info.nbytes)
        else:
            ranges.append(FileRange(part.path, part.offset, part.info.nbytes))
    dtype, first = parts[0].info
    fit = all(part.info.dtype == dtype and part.info.shape[1:] == first[1:] for part in parts)
    shape = (sum(part.info.shape[0] for part in parts), *first[1:]) if fit else ()
    return ExpertSlice(name, expert, WeightInfo(dtype, shape), tuple(ranges), merged)


def _check_within_files(slices: Mapping[str, Sequence[ExpertSlice]]) -> None:
    """Raise CorruptCheckpoint if a part ends past the end of its file."""
    sizes: dict[str, int] = {}
    for each in itertools.chain.from_iterable(slices.values()):
        for path, offset, nbytes in each.ranges:
            size = sizes.setdefault(path, -1)
            if size < 0:
                size = sizes[path] = os.stat(path).st_size
            if offset + nbytes > size:
                raise CorruptCheckpoint(path, f"{each} is said to end at byte {offset + nbytes}, and the file has {size} bytes")
