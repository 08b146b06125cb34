"""What ``torch.load`` loads, read at the speed of the drive."""

from __future__ import annotations

import errno
import os
import pickle
from collections.abc import Iterable, Mapping, Sequence
from types import NoneType
from typing import IO, Any

import torch
from torch.serialization import load as torch_load  # torch.load may be deepnvme.load by now

from deepnvme._progress import Progress, Wanted, following
from deepnvme.memory.pool import BufferPool, buffer_pool

from ._shared_engine import shared_engine
from .file_version import read_consistently
from .formats.archive import crc32_of
from .formats.contents import (
    ArchiveContents,
    CorruptCheckpoint,
    WrongChecksum,
    check_pickle,
    contents,
    data_offsets,
    is_damage,
    is_plain,
    is_zip,
    refuse_damaged,
    refuse_damaged_beginning,
    wrong_size,
)
from .formats.pickled import pickled
from .reading import read
from .storage_placement import MapLocation, PlacedStorage, memory_for, placing, unread, watching
from .verifying import refuse_compressed, verify_records


def load(
    f: str | os.PathLike[str] | IO[bytes],
    map_location: MapLocation = None,
    pickle_module: Any = None,
    *,
    weights_only: bool | None = None,
    mmap: bool | None = None,
    keys: Iterable[Any] | None = None,
    checksum: bool = False,
    pool: BufferPool | None = None,
    progress: Wanted = None,
    **pickle_load_args: Any,
) -> Any:
    """Load what ``torch.save`` or :func:`save` wrote, with the result of ``torch.load`` for the same arguments. Blocks.

    The arguments are those of ``torch.load``, by their names and in their order, with its defaults (``weights_only``: also by the
    environment's TORCH_FORCE_WEIGHTS_ONLY_LOAD and TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD), so that ``torch.load = deepnvme.load``
    works. What is no path, a file object, is left to ``torch.load``, and so are files of the older formats, with deflated
    records, and TorchScript archives. A path that ends in .safetensors is loaded as :func:`deepnvme.safetensors.load_file` does.

    ``keys``: of a mapping, only these entries, and only their bytes are read; all are where unpickling looks at tensors (sparse
    ones, classes of others). ``checksum``: verify the CRC-32 of each tensor
    that has one; files that are left to ``torch.load`` are read for it once more. ``progress``: True for a bar on stderr, where
    that is a terminal, or a function that is called with the bytes read and those wanted.

    Storages are read by direct I/O into memory of their own, on the CPU, or through pinned buffers onto a CUDA device; for
    other devices into memory of the CPU, one at a time. Nothing is mapped, but with ``mmap=True``, which is left to
    ``torch.load``: whoever truncates a file that is mapped, or a drive that fails to read it, ends the process (SIGBUS).

    Memory beyond the object: 16 MiB leased from ``pool``, by default the process's. Where a class of others, or a function as
    ``map_location``, may look at tensors while the object is made, all of them are read into memory of the CPU before, and what
    goes to a CUDA device is copied from there: then as much as that besides.

    Raises CorruptCheckpoint naming the storage with the bytes expected and found; KeyError for a key that is not there;
    UnpicklingError for what ``weights_only`` refuses; ValueError for ``checksum`` with ``mmap`` or a file object; RuntimeError
    for arguments that torch refuses; OSError; OutOfBuffers.
    """
    options: dict[str, Any] = {
        "map_location": map_location,
        "pickle_module": pickle_module,
        "weights_only": weights_only,
        **pickle_load_args,
    }
    chosen = None if keys is None else list(keys)
    if not isinstance(f, (str, bytes, os.PathLike)):
        if checksum:
            raise ValueError("checksum=True needs the path of a file")
        loaded = torch_load(f, mmap=mmap, **options)
        return loaded if chosen is None else _chosen(loaded, chosen)
    path = f
    mapped = _mapped_by_default() if mmap is None else mmap
    if mapped and checksum:
        raise ValueError("checksum=True reads every tensor, and mmap=True none before it is used: leave out one of them")
    if os.path.isdir(path):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    safe = resolve_weights_only(weights_only, pickle_module)

    def whole() -> Any:
        with following(progress, f"loading {path}") as told:
            return _load(path, chosen, mapped, checksum, safe, options, buffer_pool() if pool is None else pool, told)

    if os.fspath(path).endswith(".safetensors") and not is_zip(path):
        loaded = _load_safetensors(path, map_location, pool, progress)
    else:
        loaded = read_consistently(path, whole)
    return loaded if chosen is None else _chosen(loaded, chosen)


_TRUE = ("1", "y", "yes", "true")


def resolve_weights_only(weights_only: bool | None, pickle_module: Any = None) -> bool:
    """Whether to unpickle with ``weights_only``, decided as torch.load does from this argument, ``pickle_module`` and the
    environment. Raises RuntimeError where these contradict each other.
    """
    always, never = (
        os.environ.get(f"TORCH_FORCE_{what}_LOAD", "").lower() in _TRUE for what in ("WEIGHTS_ONLY", "NO_WEIGHTS_ONLY")
    )
    if always and never:
        raise RuntimeError("TORCH_FORCE_WEIGHTS_ONLY_LOAD and TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD are both set: unset one of them")
    chosen = (pickle_module is None and not never) if weights_only is None else weights_only
    if (always or chosen) and pickle_module is not None:
        raise RuntimeError("weights_only=True unpickles with torch's own module: leave out pickle_module, or load what you trust")
    return always or chosen


def _mapped_by_default() -> bool:
    """What ``torch.utils.serialization.config`` says, which torch has from 2.7 on."""
    try:
        from torch.utils.serialization import config
    except ImportError:
        return False
    return bool(config.load.mmap)


def _load_safetensors(path: Any, map_location: MapLocation, pool: BufferPool | None, progress: Wanted) -> dict[str, torch.Tensor]:
    from .safetensors_files import load_file

    if map_location is not None and not isinstance(map_location, (str, bytes, torch.device)):
        raise RuntimeError(f"map_location must be a device for a safetensors file, got {type(map_location).__name__}")
    device = map_location.decode() if isinstance(map_location, bytes) else map_location
    return load_file(path, "cpu" if device is None else device, pool=pool, progress=progress)


def _load(
    path: str | os.PathLike[str],
    keys: list[Any] | None,
    mmap: bool,
    checksum: bool,
    safe: bool,
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

    locate = options["map_location"]
    asks = not isinstance(locate, (NoneType, dict, str, bytes, torch.device))  # a function, by torch.load's rule

    def by_torch() -> Any:
        plain = None if found is None or found.stored else refuse_compressed(path, found)
        if checksum and found is not None:
            verify_records(path)
        with watching() as now:
            try:
                return torch_load(path, mmap=mmap, **{**options, "map_location": now.asking(locate) if asks else locate})
            except Exception as error:
                if error is not now.refused:
                    _refuse_damaged(path, found, plain, safe, error)
                raise

    if mmap or found is None or not found.stored or found.script or found.byteorder != "little":
        return by_torch()

    def fill(placed: Sequence[PlacedStorage], progress: Progress | None = None) -> None:
        read(placed, path, shared_engine(), pool, progress)
        if checksum:
            _verify(path, found, placed)

    plain = is_plain(path, found)
    wanted = _any if keys is None or not plain else _offsets_of(path, found, keys, options).__contains__
    with placing(path, found, wanted, fill) as now:
        read_before: list[PlacedStorage] = []
        if asks or not plain:
            offsets = data_offsets(path, found.storages)
            read_before = [
                PlacedStorage(offset, memory_for(record.nbytes, offset))
                for offset, record in zip(offsets, found.storages, strict=True)
                if record.nbytes and wanted(offset)
            ]
            fill(read_before, progress)
            now.filled = dict(read_before)
        whole = now.load(**{**options, "map_location": now.located_by(locate)} if asks else options)
        if not now.blind:
            _check_sizes(path, found, [*now.placed, *read_before])  # a tensor that is larger than its storage makes that grow
            if now.placed:
                fill(now.placed, progress)
            return whole
    del whole
    return by_torch()


def _refuse_damaged(
    path: str | os.PathLike[str], found: ArchiveContents | None, plain: bool | None, safe: bool, error: Exception
) -> None:
    """Raise CorruptCheckpoint if the file is why torch could not load it."""
    if found is not None:
        refuse_damaged(path, found, error, plain)
        return
    refuse_damaged_beginning(path)
    if is_damage(error) and (safe or isinstance(error, EOFError)):
        raise CorruptCheckpoint(path, f"it is not, or not wholly, what torch.save wrote: {error}") from error


def _any(offset: int) -> bool:
    return True


def _offsets_of(path: str | os.PathLike[str], found: ArchiveContents, keys: list[Any], options: Mapping[str, Any]) -> set[int]:
    """Of the storages that these entries refer to, without reading any: for pickles that look at none."""
    with unread(path, found) as now:
        chosen = _chosen(now.load(**{**options, "map_location": "cpu"}), keys)
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


def _check_sizes(path: str | os.PathLike[str], found: ArchiveContents, placed: Iterable[PlacedStorage]) -> None:
    """That the pickle and the records agree."""
    for offset, storage in placed:
        record = found.holding(offset)
        if record is None or record.nbytes != storage.nbytes():
            raise wrong_size(path, found, offset, storage.nbytes())


def _verify(path: str | os.PathLike[str], found: ArchiveContents, placed: Iterable[PlacedStorage]) -> None:
    for offset, storage in placed:
        record = found.holding(offset)
        if record is not None and record.crc32:
            crc = crc32_of(storage)
            if crc != record.crc32:
                raise WrongChecksum(path, record, offset, crc)
