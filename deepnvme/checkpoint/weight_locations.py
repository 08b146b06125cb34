"""Sources of weights that are read one by one: modules, checkpoint files and mappings."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import nn

from deepnvme.engine import Engine, File, Future
from deepnvme.memory.host import empty_aligned
from deepnvme.memory.tensor_bytes import check_storable, contiguous_strides, dtype_named
from deepnvme.model.structure import find_ties, weights_by_name
from deepnvme.model.weight_differences import WeightInfo
from deepnvme.telemetry.descriptions import shorten

from .file_io import file_version, read_consistently, started
from .formats import pt_records
from .formats.elements import Elements
from .formats.safetensors_header import indexed, read_header, shards_of

_OPEN_FILES = 16
"""Most files that are open at a time.

More shards of a checkpoint are rarely read together. The limit of descriptors is higher on every system, so that each weight
may have a file of its own.
"""


_PART_BYTES = 16 << 20
"""Bytes that are read at a time, for a weight that fills less than half of its span in the file, such as columns of a matrix."""


class Pending(Protocol):
    """A read in flight, such as ``deepnvme.Future``."""

    def result(self) -> Any:
        """Wait until the bytes have been read. Raises OSError if that fails."""


@runtime_checkable
class Source(Protocol):
    """Weights that :meth:`WeightStore.build` reads one by one; implement it for a source of your own."""

    def names(self) -> Iterable[str]:
        """Return the names of all weights, including every name of a tied weight."""

    def info(self, name: str) -> WeightInfo:
        """Return the dtype and shape of a weight."""

    def ties(self) -> Mapping[str, str]:
        """Return a mapping from each further name of a tied weight to its first name. All are among ``names``."""

    def read_into(self, name: str, out: torch.Tensor) -> Pending:
        """Start reading a weight into ``out``.

        Args:
            name: Name of the weight.
            out: uint8 tensor with as many bytes as the weight. It must not be touched until ``Pending.result`` has returned.
        """


class Location(NamedTuple):
    """The place of a weight in a file. With the first three fields only, the weight is contiguous there, as in memory."""

    path: str
    """Path of the file."""
    offset: int
    """Where the weight's first element is, in bytes from the start of the file."""
    info: WeightInfo
    """Dtype and shape that the weight has in memory."""
    elements: Elements | None = None
    """Offset, dtype, shape and strides in the file; None if the weight is contiguous there, with the dtype of ``info``."""


class OpenFiles:
    """Files that stay open for reading until :meth:`close`. If there are more than 16, only the 16 opened last stay open.

    Not thread-safe.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._files: dict[str, File] = {}

    def read(self, path: str, offset: int, out: torch.Tensor) -> Future:
        """Start reading a file at ``offset`` into ``out``; return at once.

        Raises:
            CorruptCheckpoint: If the file ends before ``out`` is full: it was truncated since its header was read.
            OSError: If the file cannot be opened.
        """
        file = self._files.get(path)
        if file is None:
            while len(self._files) >= _OPEN_FILES:
                self._files.pop(next(iter(self._files))).close()
            file = self._files[path] = self._engine.open(path, "r")
        return started(self._engine, out, file, offset)

    def close(self) -> None:
        """Close all files. Reads in flight continue. Idempotent, so it can be repeated after an interrupt."""
        while self._files:
            self._files.popitem()[1].close()


class Weights:
    """A :class:`Source` of tensors in memory and weights in files. Not thread-safe.

    Args:
        weights: By name: tensors, of any strides and on any device, and weights in files.
        files: Reads the files.

    Raises:
        TypeError: If a name is not a str; or if a value is neither a tensor nor a :class:`Location`, or is a tensor that
            is not dense or has no data.
    """

    def __init__(self, weights: Mapping[str, torch.Tensor | Location], files: OpenFiles) -> None:
        for name, weight in weights.items():
            if not isinstance(name, str):
                raise TypeError(f"a weight's name must be a str, got {name!r}")
            if not isinstance(weight, Location):
                check_storable(name, weight)
        self._weights = weights
        self._files = files
        self._versions = {weight.path: file_version(weight.path) for weight in weights.values() if isinstance(weight, Location)}

    def names(self) -> Iterable[str]:
        """Return the names of all weights."""
        return self._weights

    def info(self, name: str) -> WeightInfo:
        """Return the dtype and shape of a weight."""
        weight = self._weights[name]
        return weight.info if isinstance(weight, Location) else WeightInfo(weight.dtype, tuple(weight.shape))

    def ties(self) -> Mapping[str, str]:
        """Return a mapping from each further name of a tied weight to its first name.

        Weights are tied if they are the same memory, or the same place in a file, with the same dtype, shape and strides.
        """
        return find_ties(self._weights, _place_of)

    def read_into(self, name: str, out: torch.Tensor) -> Pending:
        """Start reading a weight; see :meth:`Source.read_into`. For a tensor in memory, blocks until it is copied.

        If a weight's layout or dtype in the file differs from memory, it is read into a temporary buffer, from which
        ``Pending.result`` copies the elements into ``out``.
        """
        weight = self._weights[name]
        if isinstance(weight, torch.Tensor):
            out.view(weight.dtype).view(weight.shape).copy_(weight.detach())
            return _DeferredRead(lambda: None)
        if not weight.info.nbytes:
            return _DeferredRead(lambda: None)
        elements = weight.elements
        if elements is not None and elements.nbytes > max(2 * weight.info.nbytes, _PART_BYTES):
            return _DeferredRead(functools.partial(self._read_in_parts, weight, elements, out))
        span = out if elements is None else empty_aligned(elements.nbytes)
        reading = self._files.read(weight.path, weight.offset, span)
        if elements is None:
            return reading

        def rearrange() -> None:
            """Wait for the read, and copy the weight's elements from the temporary buffer into ``out``."""
            reading.result()
            values = span.view(elements.dtype).as_strided(elements.shape, elements.stride)
            out.view(weight.info.dtype).view(weight.info.shape).copy_(values)

        return _DeferredRead(rearrange)

    def _read_in_parts(self, weight: Location, elements: Elements, out: torch.Tensor) -> None:
        """Read a weight in parts, divided along the dimension that has the largest stride in the file. Blocks."""
        farthest = max(range(len(elements.shape)), key=lambda each: elements.stride[each])
        count = max(_PART_BYTES // (elements.stride[farthest] * elements.dtype.itemsize), 1)
        values = out.view(weight.info.dtype).view(weight.info.shape)
        for begin in range(0, elements.shape[farthest], count):
            here = slice(begin, min(begin + count, elements.shape[farthest]))
            part = part_of(weight, [here if each == farthest else slice(None) for each in range(len(elements.shape))])
            assert isinstance(part, Location)
            read = empty_aligned(part.info.nbytes)
            Weights({"": part}, self._files).read_into("", read).result()
            place = values.narrow(farthest, begin, here.stop - begin)
            place.copy_(read.view(part.info.dtype).view(part.info.shape))

    def check_unchanged(self) -> None:
        """Raise CorruptCheckpoint if a file was written to or replaced since this object was created."""
        for path, version in self._versions.items():
            if file_version(path) != version:
                raise pt_records.CorruptCheckpoint(path, "it was changed while its weights were read: read all of them again")


def part_of(weight: torch.Tensor | Location, slices: Sequence[slice]) -> torch.Tensor | Location:
    """Return a part of a weight, which can be read without reading the rest.

    Args:
        weight: The weight.
        slices: One for each dimension of the weight, without steps.
    """
    if isinstance(weight, torch.Tensor):
        return weight[tuple(slices)]
    whole = weight.elements or Elements(weight.offset, *weight.info, contiguous_strides(weight.info.shape))
    ranges = [range(*each.indices(size)) for each, size in zip(slices, whole.shape, strict=True)]
    elements = whole.narrow(tuple(each.start for each in ranges), tuple(map(len, ranges)))
    as_in_memory = weight.elements is None and elements.contiguous
    info = WeightInfo(weight.info.dtype, elements.shape)
    return weight._replace(offset=elements.offset, info=info, elements=None if as_in_memory else elements)


def weights_in(checkpoint: str | os.PathLike[str]) -> dict[str, torch.Tensor | Location]:
    """Return where the weights of a checkpoint lie, by name. Reads only headers, not the weights.

    Args:
        checkpoint: Path of a .safetensors file; of a file in which torch.save wrote a mapping of names to tensors; of the
            index.json of several such files; or of a directory with one of these.

    Returns:
        The location of each weight in its file; but a tensor for a weight without elements, or of a kind that
        :class:`WeightStore` refuses.

    Raises:
        CorruptCheckpoint: If a file is not a checkpoint, is cut off, or lacks a tensor that the index lists.
        FileNotFoundError: If there is no checkpoint in the directory, or one of its shards is missing.
        ValueError: If the directory has several checkpoints, or the file's format would require loading it as a whole.
        UnpicklingError: If a pickle holds anything but tensors.
    """
    path = _checkpoint_path(checkpoint)
    found: dict[str, torch.Tensor | Location] = {}
    for shard, names in shards_of(path).items():
        if names is not None and not os.path.exists(shard):
            text = f"a shard of the checkpoint is missing, with {len(names)} of its tensors ({shorten(names)})"
            raise FileNotFoundError(2, text, shard)
        inside = read_consistently(shard, lambda shard=shard: _in_file(shard))  # type: ignore[misc]
        found.update(indexed(path, shard, names, inside))
    return found


def files_of(checkpoint: str | os.PathLike[str]) -> list[str]:
    """Return the files that have the weights of a checkpoint, which need not exist. Blocks while an index is read.

    Args:
        checkpoint: As for :func:`weights_in`.

    Raises:
        CorruptCheckpoint: If the index is damaged.
        FileNotFoundError: If there is no checkpoint in the directory.
        ValueError: If the directory has several checkpoints.
    """
    return list(shards_of(_checkpoint_path(checkpoint)))


def _checkpoint_path(checkpoint: str | os.PathLike[str]) -> str:
    """Return the path of the file or index that a checkpoint is, or that a directory has."""
    return _chosen(Path(checkpoint)) if os.path.isdir(checkpoint) else os.fspath(checkpoint)


def weights_in_index(
    index: Mapping[str, Mapping[str, Any]], folder: str | os.PathLike[str] | None
) -> dict[str, torch.Tensor | Location]:
    """Return where the weights of accelerate's offload index lie, by name. Reads only headers, not the weights.

    Args:
        index: Entries by the weight's name in the model, as accelerate writes them and transformers passes them on. An
            entry has either ``safetensors_file``, the ``weight_name`` in that file and optionally the ``dtype`` that the
            weight is to have in memory; or the ``dtype`` and ``shape`` of the raw bytes in ``<folder>/<name>.dat``.
        folder: Directory of the raw files; None if there are none.

    Raises:
        CorruptCheckpoint: If a file lacks a weight that the index says is in it, or is too short.
        FileNotFoundError: If a file is missing.
        ValueError: If an entry is of a raw file, and ``folder`` is None.
    """
    locations = functools.cache(_in_safetensors)
    found: dict[str, torch.Tensor | Location] = {}
    for name, entry in index.items():
        file = entry.get("safetensors_file")
        if file is None:
            found[name] = _raw(name, entry, folder)
            continue
        inside, key = locations(os.fspath(file)), entry.get("weight_name", name)
        if key not in inside:
            raise pt_records.CorruptCheckpoint(file, f"it is said to hold {key!r}, which is not there")
        location = inside[key]
        wanted = entry.get("dtype")
        dtype = location.info.dtype if wanted is None else dtype_named(wanted)
        if dtype != location.info.dtype:
            elements = Elements(location.offset, *location.info, contiguous_strides(location.info.shape))
            location = location._replace(info=WeightInfo(dtype, location.info.shape), elements=elements)
        found[name] = location
    return found


def _raw(name: str, entry: Mapping[str, Any], folder: str | os.PathLike[str] | None) -> Location:
    """Return the location of a weight in its raw file, ``<folder>/<name>.dat``, after checking the file's size."""
    if folder is None:
        raise ValueError(f"the index says that {name!r} lies in a folder, and none is given")
    info = WeightInfo(dtype_named(entry["dtype"]), tuple(entry["shape"]))
    path = os.path.join(folder, f"{name}.dat")
    size = os.stat(path).st_size
    if size < info.nbytes:
        raise pt_records.CorruptCheckpoint(path, f"expected {info.nbytes} bytes of {name!r}, found {size}")
    return Location(path, 0, info)


_KINDS = (
    "model.safetensors.index.json", "*.safetensors.index.json", "model.safetensors", "*.safetensors",
    "pytorch_model.bin.index.json", "*.index.json", "pytorch_model.bin", "*.bin", "*.pt", "*.pth",
)  # fmt: skip
"""Patterns by which a directory is searched for a checkpoint, in this order."""


def _chosen(directory: Path) -> str:
    """Return the path of the checkpoint in a directory. Raises FileNotFoundError for none, ValueError for several."""
    for pattern in _KINDS:
        found = sorted(str(path) for path in directory.glob(pattern))
        if len(found) > 1:
            raise ValueError(f"'{directory}' has several checkpoints, and no index of them: name one of {shorten(found)}")
        if found:
            return found[0]
    raise FileNotFoundError(2, f"there is no checkpoint here: expected one of {', '.join(_KINDS)}", str(directory))


def _in_file(path: str) -> dict[str, torch.Tensor | Location]:
    """Return where the weights of a checkpoint file lie, whatever its format."""
    if pt_records.is_zip(path):
        return _in_archive(path)
    if pt_records.is_pickle(path):
        text = f"'{path}' is in torch's format of before 1.6, which has to be in memory as a whole: load it, and save it anew"
        raise ValueError(text)
    return dict(_in_safetensors(path))


def _in_safetensors(path: str) -> dict[str, Location]:
    """Return where the weights of a safetensors file lie."""
    return {name: Location(path, each.offset, WeightInfo(each.dtype, each.shape)) for name, each in read_header(path).items()}


def _in_archive(path: str) -> dict[str, torch.Tensor | Location]:
    """Return where the weights of a file written by torch.save lie.

    No tensor is read: tensors are unpickled with addresses but without memory, and the addresses give the offsets in the file.
    """
    found = pt_records.records_of(path)
    stream = pt_records.check_pickle(path, found)
    if not found.storages_readable:
        what = "big-endian" if found.stored else "compressed"
        raise ValueError(f"'{path}' is {what}, and its weights do not lie in it as in memory: load it, and save its state_dict")
    unread = pt_records.UnreadStorages(path, pt_records.StoragePlaces(path, found))
    weights: dict[str, torch.Tensor | Location] = {}
    for name, tensor in _state_dict(path, pt_records.unpickle(path, stream, unread.place, weights_only=True)).items():
        storage = tensor.untyped_storage() if tensor.layout is torch.strided else None
        offset = None if storage is None or tensor.is_quantized else unread.offset_of(storage)
        if storage is None or offset is None:  # without elements, or of a kind that a store refuses later
            weights[name] = tensor
            continue
        first = offset + int(tensor.storage_offset()) * tensor.element_size()
        info = WeightInfo(tensor.dtype, tuple(tensor.shape))
        if tensor.is_conj() or tensor.is_neg():
            raise ValueError(f"'{path}' has {name!r} as a conjugate or negative view: save resolve_conj() or resolve_neg() of it")
        elements = None if tensor.is_contiguous() else Elements(first, *info, tuple(tensor.stride()))
        weights[name] = Location(path, first, info, elements)
    return weights


def _state_dict(path: str, loaded: object) -> Mapping[str, torch.Tensor]:
    """Return ``loaded`` if it is a mapping of names to tensors; raise ValueError for anything else."""
    if isinstance(loaded, Mapping) and all(isinstance(value, torch.Tensor) for value in loaded.values()):
        return loaded
    text = f"'{path}' holds {type(loaded).__name__}, and no mapping of names to tensors, such as a state_dict"
    if isinstance(loaded, Mapping):
        others = [repr(key) for key, value in loaded.items() if not isinstance(value, torch.Tensor)]
        text = f"'{path}' holds more than weights: {shorten(others)}; give the state_dict in it, from torch.load(path, mmap=True)"
    raise ValueError(text)


def _place_of(weight: torch.Tensor | Location) -> object:
    """Return a key that is equal for tied weights: the same bytes with the same dtype, shape and strides.

    None for a weight without elements.
    """
    if isinstance(weight, Location):
        return weight if weight.info.nbytes else None
    if not weight.numel():
        return None
    memory = weight.device, weight.untyped_storage().data_ptr(), weight.storage_offset()
    return *memory, weight.dtype, weight.shape, weight.stride()


class _DeferredRead(NamedTuple):
    """A pending read whose ``result`` calls a function, for example one that rearranges the weight. May be completed already."""

    result: Callable[[], None]


def source_of(given: Any, files: OpenFiles) -> Source:
    """Return the :class:`Source` for the argument of :meth:`WeightStore.build`.

    Args:
        given: A module, a checkpoint's path, a mapping of names to tensors or weights in files, or a source.
        files: Reads the files.

    Raises:
        TypeError: If ``given`` is none of these.
        Exception: Any error of :func:`weights_in`.
    """
    if isinstance(given, nn.Module):
        given = weights_by_name(given)
    elif isinstance(given, str | os.PathLike):
        given = weights_in(given)
    if isinstance(given, Mapping):
        return Weights(given, files)
    if isinstance(given, Source):
        return given
    raise TypeError(f"weights come from a module, a checkpoint's path, a mapping or a Source, got {type(given).__name__}")
