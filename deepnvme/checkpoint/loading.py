"""Load .pt files at the speed of the drive, with the results of ``torch.load``."""

from __future__ import annotations

import errno
import functools
import os
import pickle
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from types import NoneType
from typing import IO, TYPE_CHECKING, Any

import torch
from torch.serialization import load as torch_load  # deepnvme.load may have replaced torch.load

from deepnvme.engine import Engine
from deepnvme.files.regular_files import open_regular
from deepnvme.memory.pool import BufferPool, buffer_pool
from deepnvme.telemetry.profiler_ranges import profiler_range
from deepnvme.telemetry.progress import Progress, ProgressOption, shown_progress

from .file_io import Placed, memory_for, read, read_consistently, shared_engine
from .formats import pt_records
from .formats.pt_image import crc32_of
from .formats.pt_pickle import pickled
from .formats.pt_records import CorruptCheckpoint, PtRecords, WrongChecksum
from .formats.recognition import guess_format
from .formats.zip_directory import Record
from .unpickling import MapLocation, UnpicklingFile, unread
from .verification import verify_records

if TYPE_CHECKING:
    from deepnvme.drives.aio_config import AioConfig


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
    progress: ProgressOption = None,
    config: AioConfig | None = None,
    **pickle_load_args: Any,
) -> Any:
    """Load a file that ``torch.save`` or :func:`save` wrote, with the result of ``torch.load`` for the same arguments. Blocks.

    The arguments of ``torch.load`` have the same names, order and defaults, so ``torch.load = deepnvme.load`` works. A path
    that ends in .safetensors is loaded as by :func:`deepnvme.safetensors.load_file`. Left to ``torch.load`` are file objects,
    files of the formats before torch 1.6, archives with deflated records or in big-endian byte order, and TorchScript archives.

    Storages are read by direct I/O: on the CPU into memory of their own, on a CUDA device through pinned buffers. For any other
    device each storage is read into CPU memory and copied from there, one at a time. Files are mapped only with ``mmap=True``,
    which is left to ``torch.load``: if a mapped file is truncated, or the drive fails to read it, the process ends (SIGBUS).

    Memory beyond the object: 16 MiB leased from ``pool``. If a class defined outside torch, or a function given as
    ``map_location``, may look at tensors while the object is being made, all of them are first read into CPU memory. Those for
    a CUDA device are copied from there, and take as much CPU memory besides.

    Args:
        f: Path, or a file object.
        map_location: As for ``torch.load``. For a safetensors file it must be a device.
        pickle_module: As for ``torch.load``.
        weights_only: As for ``torch.load``. The default also follows the environment's TORCH_FORCE_WEIGHTS_ONLY_LOAD and
            TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD.
        mmap: As for ``torch.load``. None is the default that torch is configured with.
        keys: If the file holds a mapping, load only these entries, and read only their bytes. All bytes are read if unpickling
            looks at tensors (sparse tensors, classes defined outside torch), and from files left to ``torch.load``.
        checksum: Verify the CRC-32 of each tensor that has one. Files that are left to ``torch.load`` are read one more time
            for this.
        pool: Pool of the pinned buffers. None is the process's pool.
        progress: None for a progress bar on stderr once two seconds have passed, if that is a terminal or a notebook's; True
            for one from the beginning, False for none; or a function called with (bytes read, bytes to read).
            No effect for what is left to ``torch.load``.
        config: Settings of the engine; None for the profile of the drive, see :func:`deepnvme.engine_for`.
            No effect for what is left to ``torch.load``.
        **pickle_load_args: As for ``torch.load``.

    Raises:
        CorruptCheckpoint: If the file is damaged. Names the storage with the bytes expected and found. Also if it is no
            checkpoint: names what it looks like.
        KeyError: If the file does not have one of ``keys``.
        TypeError: If ``keys`` is given and the file holds no mapping; or if ``config`` is something else than an AioConfig.
        UnpicklingError: If the file holds what ``weights_only`` does not allow.
        ValueError: If ``checksum`` is combined with ``mmap`` or a file object; or if one of them is True for a safetensors file,
            which is not mapped and has no checksums.
        RuntimeError: If torch refuses the arguments; or for a TorchScript archive with ``weights_only``.
        OSError: If the file cannot be opened or read.
        OutOfBuffers: If the pool's budget does not allow the buffers.
    """
    options = {"map_location": map_location, "pickle_module": pickle_module, "weights_only": weights_only, **pickle_load_args}
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
        """Load the chosen entries of the file, and show progress."""
        with profiler_range("load"), shown_progress(progress, f"loading {path}") as report:
            memory = buffer_pool() if pool is None else pool
            return _load(path, chosen, mapped, checksum, safe, options, memory, report, config)

    if os.fspath(path).endswith(".safetensors") and not pt_records.is_zip(path):
        if mmap or checksum:
            what = "mmap=True is for .pt files" if mmap else "checksum=True: a safetensors file has no checksums"
            raise ValueError(f"{what}: load '{os.fspath(path)}' without")
        return _load_safetensors(path, map_location, chosen, pool, progress, config)
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


def _mapped_by_default() -> bool:
    """Return torch's configured default of ``mmap``: ``torch.utils.serialization.config``, which torch has since 2.7."""
    try:
        from torch.utils.serialization import config
    except ImportError:
        return False
    return bool(config.load.mmap)


def _load_safetensors(
    path: Any, map_location: MapLocation, keys: list[Any] | None, pool: BufferPool | None, progress: ProgressOption,
    config: AioConfig | None,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """Load a safetensors file with the arguments of :func:`load`."""
    from .safetensors_files import load_entries

    if map_location is not None and not isinstance(map_location, (str, bytes, torch.device)):
        raise RuntimeError(f"map_location must be a device for a safetensors file, got {type(map_location).__name__}")
    device = map_location.decode() if isinstance(map_location, bytes) else map_location
    choose = dict if keys is None else partial(_chosen, keys=keys)
    loaded = load_entries(path, "cpu" if device is None else device, choose, pool, progress, config)
    return loaded if keys is None else {key: loaded[key] for key in keys}


def _load(
    path: str | os.PathLike[str],
    keys: list[Any] | None,
    mmap: bool,
    checksum: bool,
    safe: bool,
    options: dict[str, Any],
    pool: BufferPool,
    progress: Progress | None,
    config: AioConfig | None,
) -> Any:
    """Load one .pt file and return the whole object. Storages that ``keys`` rule out are not read."""
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size == 0:
            raise CorruptCheckpoint(path, "the file is empty")
    found = pt_records.records_of(path) if pt_records.is_zip(path) else None
    if found is not None:
        if found.script and safe:  # torch says so, too, but neither which file nor torch.jit.load
            what = "a TorchScript archive, which holds programs"
            raise RuntimeError(f"'{os.fspath(path)}' is {what}: if you trust it, use torch.jit.load, or weights_only=False")
        pt_records.check_pickle(path, found)

    locate = options["map_location"]
    asks = not isinstance(locate, (NoneType, dict, str, bytes, torch.device))  # anything else torch.load calls as a function

    def by_torch() -> Any:
        """Leave the file to ``torch.load``. An error of it is raised as it is, unless the file is damaged or no checkpoint."""
        if checksum and found is not None:
            verify_records(path)
        try:
            return torch_load(path, mmap=mmap, **options)
        except Exception as error:
            if found is not None and found.stored:
                pt_records.refuse_damaged(path, found, error)
            elif found is not None:
                verify_records(path)
            else:
                pt_records.refuse_damaged_beginning(path)
                other = guess_format(path)
                if other is not None:  # torch's error advises to load the file with weights_only=False
                    raise CorruptCheckpoint(path, f"it is no checkpoint, but looks like {other}") from None
            raise

    if mmap or found is None or not found.stored or found.script or found.byteorder != "little":
        return by_torch()

    @functools.cache
    def engine() -> Engine:
        """Return the engine. Looks up the drive once: storages may be read one at a time."""
        return shared_engine(path, config)

    def fill(placed: Sequence[Placed], progress: Progress | None = None) -> None:
        """Read storages from the file, and verify them if their checksums are wanted."""
        records = [_record_of(path, found, each) for each in placed]
        read(placed, path, engine(), pool, progress)
        for each, record in zip(placed, records, strict=True) if checksum else ():
            if record.crc32 and (crc := crc32_of(each.memory)) != record.crc32:
                raise WrongChecksum(path, record, each.offset, crc)

    plain = pt_records.is_plain(path, found)
    offsets = None if keys is None or not plain else _offsets_of(path, found, keys, options)

    def wanted(offset: int) -> bool:
        """Return whether the storage at this offset belongs to one of the chosen keys."""
        return offsets is None or offset in offsets

    with UnpicklingFile(path, found, wanted, fill) as now:
        if asks or not plain:
            now.filled = {
                offset: memory_for(record.nbytes, offset)
                for offset, record in zip(pt_records.data_offsets(path, found.storages), found.storages, strict=True)
                if record.nbytes and wanted(offset)
            }
            fill([Placed(*item) for item in now.filled.items()], progress)
        whole = now.load(**{**options, "map_location": now.located_by(locate)} if asks else options)
        if not now.offsets_missed:
            for item in (now.filled or {}).items():
                _record_of(path, found, Placed(*item))  # again: a class of the object may have made torch grow it
            if now.placed:
                fill(now.placed, progress)
            return whole
    del whole
    return by_torch()


def _offsets_of(path: str | os.PathLike[str], found: PtRecords, keys: list[Any], options: Mapping[str, Any]) -> set[int]:
    """Return the offsets of the storages that these entries use, without reading any storage.

    Only for pickles that look at no storage's contents while they are unpickled.
    """
    with unread(path, found) as now:
        chosen = _chosen(now.load(**{**options, "map_location": "cpu"}), keys)
        module = options["pickle_module"]
        storages = pickled(chosen, module if hasattr(module, "Pickler") else pickle, 2).storages
        return {offset for storage in storages if (offset := now.offset_of(storage)) is not None}


def _chosen(whole: Any, keys: Iterable[Any]) -> Any:
    """Return the entries of ``whole`` with these keys."""
    if not isinstance(whole, Mapping):
        raise TypeError(f"keys choose entries of a mapping, and the file holds a {type(whole).__name__}: load it whole")
    missing = [key for key in keys if key not in whole]
    if missing:
        raise KeyError(f"the file has no {missing[0]!r}; there is {', '.join(map(repr, list(whole)[:10]))}")
    return {key: whole[key] for key in keys}


def _record_of(path: str | os.PathLike[str], found: PtRecords, placed: Placed) -> Record:
    """Return the record that memory is filled from. Raises CorruptCheckpoint if it has another size than the memory.

    torch grows a storage that is smaller than its tensor.
    """
    record = found.holding(placed.offset)
    if record is None or record.nbytes != placed.nbytes:
        raise pt_records.wrong_size(path, found, placed.offset, placed.nbytes)
    return record
