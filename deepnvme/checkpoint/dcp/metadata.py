"""Read the metadata of a distributed checkpoint, a pickle, without unpickling anything that could run code.

Contract: ``torch.distributed.checkpoint.metadata`` and ``.filesystem``, whose writer pickles a ``Metadata``. Allowed are the
classes and functions that such pickles refer to, in all versions of torch since 2.0. torch's own reader unpickles anything.
"""

from __future__ import annotations

import collections
import enum
import importlib
import io
import math
import os
import pickle
from collections.abc import Callable, Sized
from pathlib import Path, PurePath, PurePosixPath, PureWindowsPath
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as torch_metadata

from deepnvme.checkpoint.formats.pt_records import CorruptCheckpoint, refuse_wasteful
from deepnvme.files.regular_files import NotARegularSmallFile, read_regular

_RECORDS = {
    "torch.distributed.checkpoint.metadata": (
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
        "TensorStorageMetadata",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.distributed._shard.sharded_tensor.metadata": ("TensorProperties",),  # until torch 2.2
}  # fmt: skip
"""Names of the data classes that metadata may contain, by module. Their instances have fields and run no code."""
_ENUMS = {
    "torch.distributed.checkpoint.metadata": ("_MEM_FORMAT_ENCODING",),
    "torch.distributed._shard.sharded_tensor.metadata": ("MEM_FORMAT_ENCODING",),
}
_LARGEST = 2 << 30
"""Most bytes of a metadata file, enough for ten million parts. Unpickled, it takes up to 40 times as much memory."""


def load_metadata(path: Path, whole: bool = True) -> torch_metadata.Metadata:
    """Read the metadata file of a distributed checkpoint. Blocks.

    The file may refer to the classes that torch's writer uses, and to classes that the user has added with
    ``torch.serialization.add_safe_globals``.

    Args:
        path: The metadata file.
        whole: Whether the file describes the items of all ranks, not only the chunks of one rank.

    Raises:
        UnpicklingError: If the file refers to any other class or function. Names it.
        CorruptCheckpoint: If the file is damaged, would change a class of torch, or refers to files outside its directory; if
            ``whole``, also if it lacks chunks of a tensor.
        OSError: If the file cannot be read. Names the file.
    """
    try:
        text = read_regular(path, _LARGEST)
    except NotARegularSmallFile as error:
        raise CorruptCheckpoint(path, str(error)) from error
    refuse_wasteful(path, text)
    try:
        loaded = _Unpickler(text).load()
    except _Refused as error:
        raise pickle.UnpicklingError(
            f"'{path}' has {error} in it, which no writer of torch puts there: it may run code. If you trust it, allow that by"
            f" torch.serialization.add_safe_globals([{error}])"
        ) from None
    except Exception as error:  # a damaged pickle can raise anything
        raise CorruptCheckpoint(path, f"its pickle cannot be read: {type(error).__name__}: {error}") from error
    try:
        _check(path, loaded, whole)
    except (ValueError, RecursionError) as error:  # from showing a name with too many digits or levels for Python
        raise CorruptCheckpoint(path, f"an item has no name that can be shown: {error}") from error
    return loaded  # type: ignore[no-any-return]


class _Refused(Exception):
    """The pickle names something that is not allowed. The message is that name."""


class _Unpickler(pickle.Unpickler):
    """Unpickles only the classes and functions that torch's writer uses.

    All calls together may take no more arguments than the pickle has bytes: otherwise one long list in the memo could be copied
    by each of millions of calls.
    """

    def __init__(self, text: bytes) -> None:
        super().__init__(io.BytesIO(text))
        self._arguments_left = len(text)

    def find_class(self, module: str, name: str) -> Any:
        """Return the object for a name in the pickle.

        The object is a class of ``_RECORDS``, a dtype, a stand-in for a function or an enumeration, or one that the user has
        allowed.

        Raises _Refused for any other name.
        """
        if name in _RECORDS.get(module, ()):
            found = getattr(importlib.import_module(module), name, None)
            if found is not None:
                return found
        if name in _ENUMS.get(module, ()):
            members = getattr(importlib.import_module(module), name)
            return self._counted(lambda value: _Member(members(value)))
        function = _CALLABLE.get((module.removesuffix("._local"), name))
        if function is not None:
            return self._counted(function)
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        return _allowed(module, name)

    def _counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function for the pickle. Calling it raises ValueError when all calls together took too many arguments."""

        def call(*arguments: Any) -> Any:
            self._arguments_left -= sum(len(each) for each in arguments if isinstance(each, Sized)) + len(arguments)
            if self._arguments_left < 0:
                raise ValueError("its calls take more arguments than it has bytes")
            return function(*arguments)

        return call


class _Member:
    """Equal to a member of an enumeration, which a pickle could change for the whole process."""

    def __init__(self, member: enum.Enum) -> None:
        self._member = member

    def __eq__(self, other: object) -> bool:
        return self._member is other

    __hash__ = None  # type: ignore[assignment]


def _layout(name: str) -> torch.layout:
    """Return the ``torch.layout`` of this name. Raises ValueError if torch has something else under the name."""
    found = getattr(torch, name.removeprefix("torch."))
    if not isinstance(found, torch.layout):
        raise ValueError(f"{name} is no layout")
    return found


def _path_of(name: str) -> Callable[..., PurePath]:
    """Return the pure path class that replaces a pickled class of ``pathlib``, which may be of another operating system."""
    return PureWindowsPath if "Windows" in name else PurePosixPath if "Posix" in name else PurePath


_CALLABLE: dict[tuple[str, str], Callable[..., Any]] = {
    ("collections", "OrderedDict"): collections.OrderedDict,
    **{("pathlib", pure + name): _path_of(name) for pure in ("", "Pure") for name in ("Path", "PosixPath", "WindowsPath")},
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): _layout,
}
"""Functions that a pickle may call, by (module, name)."""


def _allowed(module: str, name: str) -> Any:
    """Return the class or function that the user has allowed with ``torch.serialization.add_safe_globals``.

    Raises _Refused if this name was not allowed.
    """
    for each in torch.serialization.get_safe_globals():
        allowed, full = each if isinstance(each, tuple) else (each, f"{each.__module__}.{each.__qualname__}")
        if full == f"{module}.{name}":
            return allowed
    raise _Refused(f"{module}.{name}")


def _is_described(item: Any) -> bool:
    """Return whether an item's metadata say where its parts are within it. If not, some elements could stay as they were."""
    try:
        return isinstance(item, torch_metadata.BytesStorageMetadata) or (
            isinstance(item, torch_metadata.TensorStorageMetadata)
            and isinstance(item.properties.dtype, torch.dtype)
            and all(
                0 <= begin <= begin + length <= whole
                for chunk in item.chunks
                for begin, length, whole in zip(chunk.offsets, chunk.sizes, item.size, strict=True)
            )
        )
    except (AttributeError, TypeError, ValueError):  # unpickling can leave out any field
        return False


def _missing_elements(item: Any) -> int:
    """Return how many elements of a described item are in none of its chunks, provided that no chunks overlap."""
    if isinstance(item, torch_metadata.BytesStorageMetadata):
        return 0
    missing: int = math.prod(item.size) - sum(math.prod(chunk.sizes) for chunk in item.chunks)
    return max(missing, 0)


def _check(path: Path, loaded: Any, whole: bool) -> None:
    """Raise CorruptCheckpoint unless ``loaded`` is complete metadata and names only files in the directory of ``path``."""
    if not isinstance(loaded, torch_metadata.Metadata) or not isinstance(getattr(loaded, "state_dict_metadata", None), dict):
        raise CorruptCheckpoint(path, f"it should hold a Metadata, and holds a {type(loaded).__name__}")
    for key, item in loaded.state_dict_metadata.items():
        if not isinstance(key, str) or not _is_described(item):
            raise CorruptCheckpoint(path, f"it does not say what item {key!r} is")
        if whole and (missing := _missing_elements(item)):
            raise CorruptCheckpoint(path, f"its chunks of item {key!r} lack {missing} of its elements")
    items = loaded.storage_data
    if not isinstance(items, dict):
        raise CorruptCheckpoint(path, "it does not say where the items are")
    if not isinstance(getattr(loaded, "storage_meta", None), torch_metadata.StorageMeta | None):
        raise CorruptCheckpoint(path, "its storage_meta is no StorageMeta")
    places = [[getattr(info, field, None) for field in ("relative_path", "offset", "length")] for info in items.values()]
    for index, (name, *numbers) in zip(items, places, strict=True):
        if not isinstance(name, str) or not all(type(number) is int and 0 <= number < 1 << 63 for number in numbers):
            raise CorruptCheckpoint(path, f"it has no file, offset and length for item {index}")
    for name in {name for name, *_ in places}:
        if not name or "\0" in name or os.path.isabs(name) or ".." in Path(name).parts:
            raise CorruptCheckpoint(path, f"{name!r} in it is no file of the checkpoint's directory")
