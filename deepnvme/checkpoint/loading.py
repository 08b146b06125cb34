"""Load .pt files at the speed of the drive, with the results of ``torch.load``."""

from __future__ import annotations

import errno
import functools
import os
import pickle
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import NoneType
from typing import IO, TYPE_CHECKING, Any

import torch
from torch.serialization import _get_restore_location, _serialization_tls
from torch.serialization import load as torch_load  # deepnvme.load may have replaced torch.load

from deepnvme._former_names import former_names
from deepnvme.memory.pool import buffer_pool
from deepnvme.telemetry.profiler_ranges import profiler_range
from deepnvme.telemetry.progress import Progress, ProgressOption, shown_progress

from .file_io import FileSlice, empty_storage, memory_for, read, read_consistently, shared_engine
from .formats import pt_records
from .formats.pickle_scan import is_plain
from .formats.pt_image import crc32_of
from .formats.pt_pickle import Place, pickled
from .formats.pt_records import CorruptCheckpoint, PtRecords, UnreadStorages, WrongChecksum, unpickle

if TYPE_CHECKING:
    from deepnvme.drives.aio_config import AioConfig


MapLocation = Any
"""A ``map_location`` of torch.load: None, a device or its name, a mapping of names, or a function."""


@former_names(config="aio_config")
def load(
    f: str | os.PathLike[str] | IO[bytes],
    map_location: MapLocation = None,
    pickle_module: Any = None,
    *,
    weights_only: bool | None = None,
    mmap: bool | None = None,
    keys: Iterable[Any] | None = None,
    checksum: bool = False,
    progress: ProgressOption = None,
    aio_config: AioConfig | None = None,
    **pickle_load_args: Any,
) -> Any:
    """Load a file that ``torch.save`` or :func:`save` wrote, with the result of ``torch.load`` for the same arguments. Blocks.

    The arguments of ``torch.load`` have the same names, order and defaults, so ``torch.load = deepnvme.load`` works. A path
    that ends in .safetensors is loaded as by :func:`deepnvme.safetensors.load_file`. Some loads are left to ``torch.load``: file
    objects, files of the formats before torch 1.6, archives with deflated records or in big-endian byte order, other pickle
    modules than Python's, and loads to the meta device. A file that cannot be unpickled is passed to ``torch.load`` too, which
    raises its own error.

    Storages are read by direct I/O: on the CPU into memory of their own, on a CUDA device through pinned buffers. For any other
    device each storage is read into CPU memory and copied from there, one at a time. Files are mapped only with ``mmap=True``,
    which is left to ``torch.load``: if a mapped file is truncated, or the drive fails to read it, the process ends (SIGBUS).

    Memory beyond the object: 16 MiB leased from the process's pool. If a class defined outside torch, or a function given as
    ``map_location``, may look at tensors while the object is being made, all tensors are first read into CPU memory. Tensors for
    a CUDA device are then copied to it, and so also take their size in CPU memory.

    Args:
        f: Path, or a file object.
        map_location: As for ``torch.load``. For a safetensors file it must be a device.
        pickle_module: As for ``torch.load``.
        weights_only: As for ``torch.load``. The default also follows the environment's TORCH_FORCE_WEIGHTS_ONLY_LOAD and
            TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD.
        mmap: As for ``torch.load``. None is False.
        keys: If the file holds a mapping, load only these entries, and read only their bytes. All bytes are read if unpickling
            may look at tensors (sparse tensors, classes defined outside torch, pickle protocol 4), and from files left to
            ``torch.load``.
        checksum: Verify the CRC-32 of each tensor that has one. Refused for files left to ``torch.load``.
        progress: None for a progress bar on stderr once two seconds have passed, if that is a terminal or a notebook's; True
            for one from the beginning, False for none; or a function called with (bytes read, bytes to read).
            No effect for files left to ``torch.load``.
        aio_config: Settings of the engine; None for the profile of the drive, see :func:`deepnvme.engine_for`.
            No effect for files left to ``torch.load``.
        **pickle_load_args: As for ``torch.load``.

    Raises:
        CorruptCheckpoint: If the file is damaged. Names the storage with the bytes expected and found. Also if the file is not a
            checkpoint, or is a TorchScript archive.
        KeyError: If the file does not have one of ``keys``.
        TypeError: If ``keys`` is given and the file does not hold a mapping; or if ``aio_config`` is not an AioConfig.
        UnpicklingError: If the file holds an object that ``weights_only`` does not allow.
        ValueError: If ``checksum`` is given for a file left to ``torch.load``, or ``keys`` for a file object; or if ``mmap`` or
            ``checksum`` is True for a safetensors file, which is not mapped and has no checksums.
        RuntimeError: If torch refuses the arguments.
        OSError: If the file cannot be opened or read.
        OutOfBuffers: If the pool's budget does not allow the buffers.
    """
    options = {"map_location": map_location, "pickle_module": pickle_module, "weights_only": weights_only, **pickle_load_args}
    if not isinstance(f, (str, bytes, os.PathLike)):
        if checksum or keys is not None:
            raise ValueError("keys and checksum=True need the path of a file")
        return torch_load(f, mmap=mmap, **options)
    path = f
    chosen = None if keys is None else list(keys)
    if os.path.isdir(path):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    options["weights_only"] = resolve_weights_only(weights_only, pickle_module)

    def whole() -> Any:
        """Load the file, or the entries ``keys`` of it, and show progress."""
        with profiler_range("load"), shown_progress(progress, f"loading {path}") as report:
            return _load(path, chosen, bool(mmap), checksum, options, report, aio_config)

    if os.fspath(path).endswith(".safetensors") and not pt_records.is_zip(path):
        if mmap or checksum:
            what = "mmap=True is for .pt files" if mmap else "checksum=True: a safetensors file has no checksums"
            raise ValueError(f"{what}: load '{os.fspath(path)}' without")
        return _load_safetensors(path, map_location, chosen, progress, aio_config)
    loaded = read_consistently(path, whole)
    return loaded if chosen is None else _chosen(loaded, chosen)


_TRUE = ("1", "y", "yes", "true")


def resolve_weights_only(weights_only: bool | None, pickle_module: Any = None) -> bool:
    """Return whether to unpickle with ``weights_only``, decided as ``torch.load`` does.

    Args:
        weights_only: The argument as given. None leaves the decision to ``pickle_module`` and the environment.
        pickle_module: The argument as given. None is torch's own module.

    Raises:
        RuntimeError: If the arguments and the environment contradict each other.
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


def _load_safetensors(
    path: Any, map_location: MapLocation, keys: list[Any] | None, progress: ProgressOption,
    aio_config: AioConfig | None,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """Load a safetensors file with the arguments of :func:`load`."""
    from .safetensors_files import load_entries

    if map_location is not None and not isinstance(map_location, (str, bytes, torch.device)):
        raise RuntimeError(f"map_location must be a device for a safetensors file, got {type(map_location).__name__}")
    device = map_location.decode() if isinstance(map_location, bytes) else map_location
    choose = dict if keys is None else partial(_chosen, keys=keys)
    loaded = load_entries(path, "cpu" if device is None else device, choose, progress, aio_config)
    return loaded if keys is None else {key: loaded[key] for key in keys}


def _load(
    path: str | os.PathLike[str],
    keys: list[Any] | None,
    mmap: bool,
    checksum: bool,
    options: Mapping[str, Any],
    progress: Progress | None,
    aio_config: AioConfig | None,
) -> Any:
    """Load one .pt file and return its object. Storages that none of the entries ``keys`` needs are not read."""
    found = pt_records.records_of(path) if pt_records.is_zip(path) else None
    if found is not None:
        stream = pt_records.check_pickle(path, found)
        if found.storages_readable and not mmap and not _torch_makes_storages(options):
            try:
                ours = {name: value for name, value in options.items() if name != "pickle_module"}
                return _load_storages(path, found, stream, keys, checksum, ours, progress, aio_config)
            except _NotUnpickled as error:
                if checksum:
                    raise error.__cause__ or error from None
    if checksum:
        raise ValueError(f"'{os.fspath(path)}' is left to torch.load with these arguments, which verifies no checksums")
    try:
        return torch_load(path, mmap=mmap, **options)
    except Exception as error:
        if found is None and not pt_records.is_pickle(path):
            raise CorruptCheckpoint(path, "it is neither an archive of torch.save nor a file of torch before 1.6") from error
        raise


def _torch_makes_storages(options: Mapping[str, Any]) -> bool:
    """Return whether ``torch.load`` makes storages without their bytes, unpickles in another way, or warns of its arguments."""
    return (
        str(options["map_location"]) == "meta"
        or options["pickle_module"] not in (None, pickle)
        or torch._guards.detect_fake_mode(None) is not None
        or _serialization_tls.skip_data
        or (options["weights_only"] and not options.keys() <= {"map_location", "pickle_module", "weights_only"})
    )


class _NotUnpickled(Exception):
    """The file cannot be unpickled. ``torch.load`` then raises its own error, with its advice."""


def _unpickled(path: str | os.PathLike[str], stream: bytes, place: Place, options: Mapping[str, Any]) -> Any:
    """Return the object of a file's pickle. Raises _NotUnpickled for an error that is neither of memory nor of the file."""
    try:
        return unpickle(path, stream, place, **options)
    except (OSError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise _NotUnpickled from error


def _load_storages(
    path: str | os.PathLike[str],
    found: PtRecords,
    stream: bytes,
    keys: list[Any] | None,
    checksum: bool,
    options: Mapping[str, Any],
    progress: Progress | None,
    aio_config: AioConfig | None,
) -> Any:
    """Unpickle a file, and read its storages into their memory by the engine."""
    storages = pt_records.StoragePlaces(path, found)
    locate = options["map_location"]
    asks = not isinstance(locate, (NoneType, dict, str, bytes, torch.device))  # anything else torch.load calls as a function
    plain = is_plain(stream)
    unread = None if keys is None or not plain else UnreadStorages(path, storages)
    wanted = None if unread is None else _offsets_of(path, stream, unread, keys or (), options)
    engine = functools.cache(partial(shared_engine, path, aio_config))  # looks up the drive once, not for each storage
    restored: Callable[[Any, str], torch.UntypedStorage] = _get_restore_location(locate)  # type: ignore[no-untyped-call]
    placed: dict[str, FileSlice] = {}

    @functools.cache
    def device_of(location: str) -> torch.device | None:
        """Return the device that storages from this location are read to; None if torch makes them from CPU storages."""
        empty = empty_storage(0)
        moved = restored(empty, location)
        return moved.device if moved is empty or moved.device.type == "cuda" else None

    def fill(placed: Mapping[str, FileSlice], progress: Progress | None = None) -> None:
        """Read storages from the file, and verify them if their checksums are wanted."""
        records = [storages.place(key, each.nbytes)[0] for key, each in placed.items()]  # the size again: torch may have grown it
        if placed:
            read(list(placed.values()), path, engine(), buffer_pool(), progress)
        for record, each in zip(records, placed.values(), strict=True) if checksum else ():
            if record.crc32 and (crc := crc32_of(each.memory)) != record.crc32:
                raise WrongChecksum(path, record, each.offset, crc)

    def place(key: str, nbytes: int, location: str) -> torch.UntypedStorage:
        """Return the memory of a storage, which is filled later if it is on the CPU or a CUDA device."""
        _, offset = storages.place(key, nbytes)
        if unread is not None and wanted is not None and nbytes and offset not in wanted:
            return unread.place(key, nbytes, location)
        if not nbytes:
            made: Any = empty_storage(0)
        elif early is not None:
            made = early[key].memory
        else:
            device = device_of(location)
            made = memory_for(nbytes, offset) if device is None or device.type == "cpu" else empty_storage(nbytes, device)
            if device is not None:
                placed[key] = FileSlice(offset, made)
                return made  # type: ignore[no-any-return]
            fill({key: FileSlice(offset, made)})
        return restored(made, location)

    early: dict[str, FileSlice] | None = None
    if asks or not plain:  # code that looks at storages while the file is unpickled
        early = {
            key: FileSlice(offset, memory_for(record.nbytes, offset))
            for key, (record, offset) in storages.places.items()
            if record.nbytes and (wanted is None or offset in wanted)
        }
        fill(early, progress)
    whole = _unpickled(path, stream, place, options)
    for key, each in (early or {}).items():
        storages.place(key, each.nbytes)  # again: a class of the object may have made torch grow it
    fill(placed, progress)
    return whole


def _offsets_of(
    path: str | os.PathLike[str], stream: bytes, unread: UnreadStorages, keys: Iterable[Any], options: Mapping[str, Any]
) -> set[int]:
    """Return the offsets of the storages that the entries ``keys`` use, without reading any storage.

    Only for pickles that look at no storage's contents while they are unpickled.
    """
    whole = _unpickled(path, stream, unread.place, {**options, "map_location": "cpu"})
    try:
        chosen = _chosen(whole, keys)
    except (KeyError, TypeError):
        return set()  # nothing has to be read for this error, which load() raises at the end
    storages = pickled(chosen, 2).storages
    return {offset for storage in storages if (offset := unread.offset_of(storage)) is not None}


def _chosen(whole: Any, keys: Iterable[Any]) -> Any:
    """Return the entries ``keys`` of ``whole``. Raises TypeError if ``whole`` is not a mapping, KeyError if a key is missing."""
    if not isinstance(whole, Mapping):
        raise TypeError(f"keys choose entries of a mapping, and the file holds a {type(whole).__name__}: load it whole")
    missing = [key for key in keys if key not in whole]
    if missing:
        raise KeyError(f"the file has no {missing[0]!r}; there is {', '.join(map(repr, list(whole)[:10]))}")
    return {key: whole[key] for key in keys}
