"""What ``torch.load`` loads, read at the speed of the drive."""

from __future__ import annotations

import errno
import os
import pickle
from collections.abc import Iterable, Mapping
from types import ModuleType, NoneType
from typing import Any

import torch

from deepnvme._progress import Progress, Wanted, following
from deepnvme.swap.buffers import BufferPool, buffer_pool

from ._shared_engine import shared_engine
from .archive import crc32_of
from .contents import (
    Contents,
    CorruptCheckpoint,
    WrongChecksum,
    check_pickle,
    check_storages,
    contents,
    data_offsets,
    is_plain,
    is_zip,
)
from .one_version import of_one_version
from .pickled import pickled
from .placing import MapLocation, Placed, memory_for, name_of, placing
from .reading import read
from .verifying import verify_records


def load(
    path: str | os.PathLike[str],
    map_location: MapLocation = None,
    *,
    weights_only: bool = True,
    mmap: bool = False,
    keys: Iterable[Any] | None = None,
    checksum: bool = False,
    pickle_module: ModuleType | None = None,
    pool: BufferPool | None = None,
    progress: Wanted = None,
) -> Any:
    """Load what ``torch.save`` or :func:`save` wrote, with the result of ``torch.load`` for the same arguments. Blocks.

    ``keys``: of a mapping, only these entries, and only their bytes are read. ``checksum``: verify the CRC-32 of each tensor
    that has one; files that are left to ``torch.load`` are read for it once more. ``progress``: True for a bar on stderr, where
    that is a terminal, or a function that is called with the bytes read and those wanted.

    Storages are read by direct I/O into memory of their own, on the CPU, or through pinned buffers onto a CUDA device; into
    that of other devices they come through the page cache. Files of the older formats and with deflated records are left to
    ``torch.load``, and so are ``mmap=True`` and TorchScript archives.

    Memory beyond the object: 16 MiB leased from ``pool``, by default the process's. Where a class of others, or a function as
    ``map_location``, may look at tensors while the object is made, all of them are read into memory of the CPU before, and what
    goes to a CUDA device is copied from there: then as much as that besides.

    Raises CorruptCheckpoint naming the storage with the bytes expected and found; KeyError for a key that is not there;
    UnpicklingError for what ``weights_only`` refuses; ValueError for ``checksum`` with ``mmap``; OSError; OutOfBuffers.
    """
    if mmap and checksum:
        raise ValueError("checksum=True reads every tensor, and mmap=True none before it is used: leave out one of them")
    if os.path.isdir(path):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    options: dict[str, Any] = {"map_location": map_location, "weights_only": weights_only, "pickle_module": pickle_module}
    chosen = None if keys is None else list(keys)

    def whole() -> Any:
        with following(progress, f"loading {path}") as told:
            return _load(path, chosen, mmap, checksum, options, buffer_pool() if pool is None else pool, told)

    loaded = of_one_version(path, whole)
    return loaded if chosen is None else _chosen(loaded, chosen)


def _load(
    path: str | os.PathLike[str],
    keys: list[Any] | None,
    mmap: bool,
    checksum: bool,
    options: dict[str, Any],
    pool: BufferPool,
    progress: Progress | None,
) -> Any:
    """The whole object; of storages that only other ``keys`` refer to, nothing was read."""
    if os.path.getsize(path) == 0:
        raise CorruptCheckpoint(path, "the file is empty")
    found = contents(path) if is_zip(path) else None
    if found is not None:
        check_pickle(path, found)

    def by_torch() -> Any:
        if checksum and found is not None:
            verify_records(path)
        return torch.load(path, mmap=mmap, **options)

    if mmap or found is None or not found.stored or found.script or found.byteorder != "little":
        return by_torch()
    wanted = _any if keys is None else _offsets_of(path, found, keys, options).__contains__

    def fill(placed: list[Placed]) -> None:
        read(placed, path, shared_engine(), pool, progress)
        if checksum:
            _verify(path, found, placed)

    locate = options["map_location"]
    asks = not isinstance(locate, (NoneType, dict, str, bytes, torch.device))  # a function, by torch.load's rule
    with placing(path, wanted) as now:
        plain = not asks and is_plain(path, found)
        read_before: list[Placed] = []
        if not plain:
            offsets = data_offsets(path, found.storages)
            read_before = [
                Placed(offset, memory_for(record.nbytes, offset))
                for offset, record in zip(offsets, found.storages, strict=True)
                if record.nbytes and wanted(offset)
            ]
            fill(read_before)
            now.filled = dict(read_before)
        whole = _mapped(path, found, {**options, "map_location": now.located_by(locate)} if asks else options)
        if not now.blind:
            if plain:
                _check_sizes(path, found, now.placed)
                fill(now.placed)
                if checksum:
                    _verify(path, found, now.elsewhere)
            else:
                _check_sizes(path, found, read_before)  # which a tensor that is larger than its storage makes grow
            return whole
    del whole  # slices of the mapping
    return by_torch()


def _any(offset: int) -> bool:
    return True


def _mapped(path: str | os.PathLike[str], found: Contents, options: Mapping[str, Any]) -> Any:
    with open(path, "rb") as file:  # torch maps only what has a name in UTF-8
        try:
            return torch.load(name_of(file, path), mmap=True, **options)
        except Exception:
            check_storages(path, found)
            raise


def _offsets_of(path: str | os.PathLike[str], found: Contents, keys: list[Any], options: Mapping[str, Any]) -> set[int]:
    """Of the storages that these entries refer to. The file is mapped for it, and no storage is read."""
    with placing(path, lambda offset: False) as now:
        chosen = _chosen(_mapped(path, found, {**options, "map_location": "cpu"}), keys)
        module = options["pickle_module"]
        storages = pickled(chosen, module if hasattr(module, "Pickler") else pickle, 2).storages
        return {offset for storage in storages if (offset := now.offset_of(storage)) is not None}


def _chosen(whole: Any, keys: Iterable[Any]) -> Any:
    if not isinstance(whole, Mapping):
        raise TypeError(f"keys choose entries of a mapping, and the file holds a {type(whole).__name__}: load it whole")
    missing = [key for key in keys if key not in whole]
    if missing:
        raise KeyError(f"the file has no {missing[0]!r}; there is {', '.join(map(repr, list(whole)[:10]))}")
    return {key: whole[key] for key in keys}


def _check_sizes(path: str | os.PathLike[str], found: Contents, placed: Iterable[Placed]) -> None:
    """That the pickle and the records agree."""
    for offset, storage in placed:
        record = found.holding(offset)
        if record is None or record.nbytes != storage.nbytes():
            key, nbytes = (record.key, record.nbytes) if record is not None else ("?", 0)
            raise CorruptCheckpoint(path, f"storage {key} at byte {offset}: expected {storage.nbytes()} bytes, found {nbytes}")


def _verify(path: str | os.PathLike[str], found: Contents, placed: Iterable[Placed]) -> None:
    for offset, storage in placed:
        record = found.holding(offset)
        if record is not None and record.crc32:
            crc = crc32_of(storage)
            if crc != record.crc32:
                raise WrongChecksum(path, record, offset, crc)
