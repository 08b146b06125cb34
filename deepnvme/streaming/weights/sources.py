"""Where the weights of a new store come from, each of them only when its turn has come."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import nn

from deepnvme._listed import listed
from deepnvme.checkpoint.file_version import read_consistently, version_of
from deepnvme.checkpoint.formats.contents import (
    CorruptCheckpoint,
    check_pickle,
    contents,
    is_pickle,
    is_zip,
    refuse_damaged_beginning,
)
from deepnvme.checkpoint.formats.safetensors_header import indexed, read_header, shards_of
from deepnvme.checkpoint.formats.tensor_archive import Elements
from deepnvme.checkpoint.reading import started
from deepnvme.checkpoint.storage_placement import unread
from deepnvme.engine import Engine, File
from deepnvme.memory.tensor_bytes import check_storable

from .blocks import weights_of
from .manifest import WeightInfo


class Pending(Protocol):
    """Bytes on their way: ``deepnvme.Future`` and the like."""

    def result(self) -> Any:
        """Wait until they are there. Raises OSError."""


@runtime_checkable
class Source(Protocol):
    """Weights by name. Whoever knows where a model's are without having them in memory can be one."""

    def names(self) -> Iterable[str]: ...

    def info(self, name: str) -> WeightInfo: ...

    def ties(self) -> Mapping[str, str]:
        """Further names of weights, among ``names``, with the first."""

    def read_into(self, name: str, out: torch.Tensor) -> Pending:
        """Start reading a weight into as many bytes as it has; they are not to be touched until the result is there."""


class Location(NamedTuple):
    """A weight that lies in a file, contiguous, as it is in memory."""

    path: str
    offset: int
    """Bytes."""
    info: WeightInfo


class Rearranged(NamedTuple):
    """A weight that lies in a file otherwise than in memory: with other strides, or to be conjugated or negated."""

    path: str
    elements: Elements
    conj: bool
    neg: bool

    @property
    def info(self) -> WeightInfo:
        return WeightInfo(self.elements.dtype, self.elements.shape)

    def seen_in(self, span: torch.Tensor) -> torch.Tensor:
        """It, in its bytes of the file from the first element to the last."""
        seen = span.view(self.elements.dtype).as_strided(self.elements.shape, self.elements.stride)
        seen = seen.conj() if self.conj else seen
        return torch._neg_view(seen) if self.neg else seen


InFile = Location | Rearranged


class Weights:
    """Of a mapping: tensors, which may be of any strides and on any device, and what lies in files. A Source.

    Raises TypeError for anything else, and for tensors without data. Closes its files in the end.
    """

    def __init__(self, weights: Mapping[str, torch.Tensor | InFile], engine: Engine) -> None:
        for name, weight in weights.items():
            if not isinstance(name, str):
                raise TypeError(f"a weight's name must be a str, got {name!r}")
            if not isinstance(weight, InFile):
                check_storable(name, weight)
        self._weights = weights
        self._engine = engine
        self._files: dict[str, File] = {}
        self._versions = {weight.path: version_of(weight.path) for weight in weights.values() if isinstance(weight, InFile)}

    def names(self) -> Iterable[str]:
        return self._weights

    def info(self, name: str) -> WeightInfo:
        weight = self._weights[name]
        return weight.info if isinstance(weight, InFile) else WeightInfo(weight.dtype, tuple(weight.shape))

    def ties(self) -> Mapping[str, str]:
        first: dict[object, str] = {}
        return {
            name: first[same]
            for name, weight in self._weights.items()
            if (same := _place_of(weight)) is not None and first.setdefault(same, name) != name
        }

    def read_into(self, name: str, out: torch.Tensor) -> Pending:
        weight = self._weights[name]
        if isinstance(weight, InFile) and not weight.info.nbytes:
            return _Done()
        if isinstance(weight, Location):
            return started(self._engine, out, self._file(weight.path), weight.offset)
        if isinstance(weight, Rearranged):
            span = torch.empty(weight.elements.nbytes, dtype=torch.uint8, device="cpu")
            started(self._engine, span, self._file(weight.path), weight.elements.offset).result()
            weight = weight.seen_in(span)
        out.view(weight.dtype).view(weight.shape).copy_(weight.detach())
        return _Done()

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def check_unchanged(self) -> None:
        """Raise CorruptCheckpoint if a file was written to, or replaced, while it was read."""
        for path, version in self._versions.items():
            if version_of(path) != version:
                raise CorruptCheckpoint(path, "it was changed while its weights were read: build the store again")

    def _file(self, path: str) -> File:
        file = self._files.get(path)
        if file is None:
            file = self._files[path] = self._engine.open(path, "r")
        return file


def weights_in(checkpoint: str | os.PathLike[str]) -> dict[str, torch.Tensor | InFile]:
    """Where a checkpoint's weights lie: a .safetensors file; what torch.save wrote of a mapping of tensors; the index.json of
    several such files; or a directory with one of these.

    Raises CorruptCheckpoint for what is none, cut off, or lacks a tensor that its index has; FileNotFoundError for a shard;
    ValueError for a directory with several, and for what would have to be in memory as a whole. UnpicklingError for a pickle
    with anything but tensors.
    """
    path = _chosen(Path(checkpoint)) if os.path.isdir(checkpoint) else os.fspath(checkpoint)
    found: dict[str, torch.Tensor | InFile] = {}
    for shard, names in shards_of(path).items():
        if names is not None and not os.path.exists(shard):
            text = f"a shard of the checkpoint is missing, with {len(names)} of its tensors ({listed(names)})"
            raise FileNotFoundError(2, text, shard)
        inside = read_consistently(shard, lambda shard=shard: _in_file(shard))  # type: ignore[misc]
        found.update(indexed(path, shard, names, inside))
    return found


_KINDS = (
    "model.safetensors.index.json", "*.safetensors.index.json", "model.safetensors", "*.safetensors",
    "pytorch_model.bin.index.json", "*.index.json", "pytorch_model.bin", "*.bin", "*.pt", "*.pth",
)  # fmt: skip
"""What a directory is looked for, in this order."""


def _chosen(directory: Path) -> str:
    for pattern in _KINDS:
        found = sorted(str(path) for path in directory.glob(pattern))
        if len(found) > 1:
            raise ValueError(f"'{directory}' has several checkpoints, and no index of them: name one of {listed(found)}")
        if found:
            return found[0]
    raise FileNotFoundError(2, f"there is no checkpoint here: expected one of {', '.join(_KINDS)}", str(directory))


def _in_file(path: str) -> dict[str, torch.Tensor | InFile]:
    if is_zip(path):
        return _in_archive(path)
    if is_pickle(path):
        refuse_damaged_beginning(path)
        text = f"'{path}' is in torch's format of before 1.6, which has to be in memory as a whole: load it, and save it anew"
        raise ValueError(text)
    return {each.name: Location(path, each.offset, WeightInfo(each.dtype, each.shape)) for each in read_header(path).tensors}


def _in_archive(path: str) -> dict[str, torch.Tensor | InFile]:
    """Nothing of the tensors is read: torch unpickles them over addresses that say where in the file they are."""
    found = contents(path)
    check_pickle(path, found)
    if found.script or not found.stored or found.byteorder != "little":
        what = "a TorchScript archive" if found.script else f"{found.byteorder}-endian" if found.stored else "compressed"
        raise ValueError(f"'{path}' is {what}, and its weights do not lie in it as in memory: load it, and save its state_dict")
    with unread(path, found) as now:
        weights: dict[str, torch.Tensor | InFile] = {}
        for name, tensor in _state_dict(path, now.load(weights_only=True, map_location="cpu")).items():
            storage = tensor.untyped_storage() if tensor.layout is torch.strided else None
            offset = None if storage is None or tensor.is_quantized else now.offset_of(storage)
            if storage is None or offset is None:  # without elements, or of a kind that no store takes
                weights[name] = tensor
                continue
            first = offset + int(tensor.storage_offset()) * tensor.element_size()
            info = WeightInfo(tensor.dtype, tuple(tensor.shape))
            if tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg()):
                weights[name] = Location(path, first, info)
            else:
                elements = Elements(first, *info, tuple(tensor.stride()))
                weights[name] = Rearranged(path, elements, tensor.is_conj(), tensor.is_neg())
    return weights


def _state_dict(path: str, loaded: object) -> Mapping[str, torch.Tensor]:
    if isinstance(loaded, Mapping) and all(isinstance(value, torch.Tensor) for value in loaded.values()):
        return loaded
    text = f"'{path}' holds {type(loaded).__name__}, and no mapping of names to tensors, such as a state_dict"
    if isinstance(loaded, Mapping):
        others = [repr(key) for key, value in loaded.items() if not isinstance(value, torch.Tensor)]
        text = f"'{path}' holds more than weights: {listed(others)}; give the state_dict in it, from torch.load(path, mmap=True)"
    raise ValueError(text)


def _place_of(weight: torch.Tensor | InFile) -> object:
    """Equal for those that are the same memory, seen alike; None for what has none."""
    if isinstance(weight, InFile):
        return weight if weight.info.nbytes else None
    if not weight.numel():
        return None
    memory = weight.device, weight.untyped_storage().data_ptr(), weight.storage_offset()
    return *memory, weight.dtype, weight.shape, weight.stride()


class _Done:
    def result(self) -> None:
        """It is."""


def source_of(given: Any, engine: Engine) -> Source:
    """Of a module, a path, a mapping, or a source itself. Raises TypeError for anything else."""
    if isinstance(given, nn.Module):
        return Weights(weights_of(given), engine)
    if isinstance(given, str | os.PathLike):
        return Weights(weights_in(given), engine)
    if isinstance(given, Mapping):
        return Weights(given, engine)
    if isinstance(given, Source):
        return given
    raise TypeError(f"weights come from a module, a checkpoint's path, a mapping or a Source, got {type(given).__name__}")
