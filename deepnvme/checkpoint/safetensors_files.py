"""Save and load safetensors files: the functions of :mod:`deepnvme.safetensors`."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from deepnvme._former_names import former_names
from deepnvme.engine import Engine
from deepnvme.memory.pool import buffer_pool
from deepnvme.telemetry.progress import Progress, ProgressOption, shown_progress

from .file_io import FileSlice, empty_storage, memory_for, read, read_consistently, shared_engine
from .formats import safetensors_header
from .formats.elements import Elements
from .formats.file_image import FileImage
from .publication import Destination
from .saving import save_to

if TYPE_CHECKING:
    from deepnvme.drives.aio_config import AioConfig

Choice = Callable[[Mapping[str, Elements]], Mapping[str, Elements]]
"""Function that selects the entries to load from all entries of a file, both by name."""


@former_names(config="aio_config")
def save_file(
    tensors: dict[str, torch.Tensor],
    filename: str | os.PathLike[str],
    metadata: dict[str, str] | None = None,
    *,
    fsync: bool = True,
    progress: ProgressOption = None,
    aio_config: AioConfig | None = None,
) -> None:
    """Save tensors to a safetensors file. Blocks.

    The file appears under its name when it is whole, as with :func:`deepnvme.save`. Of a conjugate or negative view, the
    values of the view are saved; the safetensors library saves the values of the viewed tensor. Memory beyond the
    tensors: 16 MiB leased from the process's pool.

    Args:
        tensors: By name: contiguous, dense tensors on the CPU or CUDA devices, none overlapping another.
        filename: Path of the file.
        metadata: Strings by name. Their order is kept, while safetensors writes them in random order.
        fsync: As for :func:`deepnvme.save`.
        progress: As for :func:`deepnvme.save`.
        aio_config: Settings of the engine; None for the profile of the drive, see :func:`deepnvme.engine_for`.

    Raises:
        Exception: First of all, the error of an earlier :func:`deepnvme.async_save` that was not reported yet.
        ValueError: If a tensor is not contiguous or not dense.
        KeyError: If the format does not have a tensor's dtype.
        NotImplementedError: If a tensor is on the meta device. This is a RuntimeError too.
        RuntimeError: If tensors share memory.
        TypeError: If a name or the metadata are not strings.
        OSError: From writing, naming the file. All errors above this one are raised before anything is created.
        OutOfBuffers: If the pool's budget does not allow the buffers.
    """

    make = partial(safetensors_image, tensors, metadata)
    save_to(Destination(Path(filename), fsync, aio_config=aio_config), make, progress)


def safetensors_image(tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None, across: object = None) -> FileImage:
    """Return the image of a safetensors file. Arguments and errors are those of :func:`save_file`; ``across`` is not used."""
    safetensors_header.check_savable(tensors)
    header, names = safetensors_header.make_header(tensors, metadata)
    image = FileImage()
    image.add_text(header)
    image.add_each([tensors[name].resolve_conj().resolve_neg() for name in names])
    return image


@former_names(config="aio_config")
def load_file(
    filename: str | os.PathLike[str],
    device: str | int | torch.device = "cpu",
    *,
    backend: str = "mmap",
    progress: ProgressOption = None,
    aio_config: AioConfig | None = None,
) -> dict[str, torch.Tensor]:
    """Load a safetensors file, or all shards of a ``model.safetensors.index.json``. Blocks.

    Args:
        filename: Path of the file or of the index.
        device: Where the tensors are loaded to. An int is the index of a CUDA device.
        backend: Accepted as by safetensors; has no effect.
        progress: As for :func:`deepnvme.load`, for each file.
        aio_config: Settings of the engine; None for the profile of the drive, see :func:`deepnvme.engine_for`.

    Returns:
        The tensors by name, each in its own memory.

    Raises:
        CorruptCheckpoint: If a file is damaged. Names the tensor with the bytes expected and found.
        OSError: If a file cannot be opened or read.
        OutOfBuffers: If the pool's budget does not allow the buffers.
    """
    return load_entries(filename, device, dict, progress, aio_config)


def load_entries(
    filename: str | os.PathLike[str], device: str | int | torch.device, choose: Choice,
    progress: ProgressOption, aio_config: AioConfig | None,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """Load chosen tensors of a safetensors file, or of all shards of an index, and read only their bytes. Blocks.

    The other arguments and the errors are those of :func:`load_file`.

    Args:
        choose: Selects the tensors to load from the entries of each file.
    """
    target = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    loaded: dict[str, torch.Tensor] = {}
    shards = safetensors_header.shards_of(filename)
    engine = shared_engine(filename, aio_config)
    with shown_progress(progress, f"loading {filename}") as report:
        for shard, names in shards.items():
            found = read_consistently(shard, partial(_load, shard, target, choose, engine, report))
            loaded.update(safetensors_header.indexed(filename, shard, names, found))
    return loaded


@former_names(config="aio_config")
def save_model(
    model: torch.nn.Module,
    filename: str | os.PathLike[str],
    metadata: dict[str, str] | None = None,
    force_contiguous: bool = True,
    *,
    fsync: bool = True,
    progress: ProgressOption = None,
    aio_config: AioConfig | None = None,
) -> None:
    """Save the ``state_dict`` of a model to a safetensors file. Blocks.

    If several names stand for one tensor (tied weights), only the alphabetically first name that covers the whole storage
    is saved. Each other name is recorded in the metadata as ``{"other": "first"}``, unless the metadata already have an
    entry of that name.

    Args:
        model: The model.
        filename: As for :func:`save_file`.
        metadata: As for :func:`save_file`.
        force_contiguous: Save contiguous copies of tensors that are not contiguous, which takes memory. If False, such
            tensors raise ValueError.
        fsync: As for :func:`deepnvme.save`.
        progress: As for :func:`deepnvme.save`.
        aio_config: Settings of the engine; None for the profile of the drive, see :func:`deepnvme.engine_for`.

    Raises:
        RuntimeError: If tensors share parts of a larger storage that no name covers as a whole.
        Exception: Any error of :func:`save_file`.
    """
    tensors = dict(model.state_dict())
    kept_for = _left_out(tensors)
    for name in kept_for:
        del tensors[name]
    if force_contiguous:
        tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    else:
        safetensors_header.check_contiguous(tensors, "save with force_contiguous=True")
    if kept_for:
        metadata = {**(metadata or {}), **{name: kept for name, kept in kept_for.items() if name not in (metadata or {})}}
    save_file(tensors, filename, metadata, fsync=fsync, progress=progress, aio_config=aio_config)


@former_names(config="aio_config")
def load_model(
    model: torch.nn.Module,
    filename: str | os.PathLike[str],
    strict: bool = True,
    device: str | int | torch.device = "cpu",
    *,
    backend: str = "mmap",
    progress: ProgressOption = None,
    aio_config: AioConfig | None = None,
) -> tuple[set[str], list[str]]:
    """Load a safetensors file, or all shards of an index, into a model. Blocks.

    Args:
        model: The model whose tensors are overwritten.
        filename: As for :func:`load_file`.
        strict: Raise if names are missing or unexpected.
        device: Where the tensors are loaded to before they are copied into the model's.
        backend: As for :func:`load_file`.
        progress: As for :func:`load_file`.
        aio_config: Settings of the engine; None for the profile of the drive, see :func:`deepnvme.engine_for`.

    Returns:
        (missing, unexpected): the names of the model that the file lacks, and the names of the file that the model lacks. A name
        that is tied to a name in the file is in neither.

    Raises:
        RuntimeError: If shapes differ; or, with ``strict``, if names are missing or unexpected. The other tensors are
            loaded by then.
        Exception: Any error of :func:`load_file`.
    """
    loaded = load_file(filename, device, backend=backend, progress=progress, aio_config=aio_config)
    kept_for = _left_out(model.state_dict(), preferred=loaded)
    result = model.load_state_dict(loaded, strict=False)
    missing = set(result.missing_keys).difference(kept_for)
    unexpected = list(result.unexpected_keys) + [name for name in kept_for if name not in result.missing_keys]
    if strict and (missing or unexpected):
        wrong = [("Missing", sorted(missing)), ("Unexpected", sorted(unexpected))]
        lines = [f"{what} key(s) in state_dict: {', '.join(map(json.dumps, names))}" for what, names in wrong if names]
        raise RuntimeError("\n    ".join([f"Error(s) in loading state_dict for {type(model).__name__}:", *lines]))
    return missing, unexpected


def _load(path: str, device: torch.device, choose: Choice, engine: Engine, progress: Progress | None) -> dict[str, torch.Tensor]:
    """Load the chosen tensors of one file."""
    return load_elements(path, choose(safetensors_header.read_header(path)), device, engine, progress)


def load_elements(
    path: str, entries: Mapping[str, Elements], device: torch.device, engine: Engine, progress: Progress | None
) -> dict[str, torch.Tensor]:
    """Load tensors that a header has described. Blocks. The errors are those of :func:`deepnvme.checkpoint.file_io.read`.

    Args:
        path: The file.
        entries: Where each tensor is in the file, by name.
        device: Where the tensors are loaded to.
        engine: Engine that does the transfers.
        progress: Called with (bytes read, bytes to read).
    """
    direct = device if device.type == "cuda" else torch.device("cpu")
    storages = {name: _storage(entry, direct) for name, entry in entries.items()}
    read([FileSlice(entries[name].offset, storage) for name, storage in storages.items() if storage.nbytes()],
         path, engine, buffer_pool(), progress)  # fmt: skip
    loaded = {}
    for name, entry in sorted(entries.items()):
        tensor = torch.empty(0, dtype=entry.dtype, device=direct)
        loaded[name] = tensor.set_(storages[name], 0, entry.shape).to(device)  # type: ignore[call-overload]
    return loaded


def _storage(entry: Elements, device: torch.device) -> torch.UntypedStorage:
    """Return a new storage for a tensor of the file.

    On the CPU, direct I/O needs no copy into it if the tensor's offset in the file is a multiple of its element size.
    """
    if device.type == "cpu" and entry.offset % entry.dtype.itemsize == 0:
        return memory_for(entry.nbytes, entry.offset)
    return empty_storage(entry.nbytes, device)


# Names that share a tensor, which the format cannot express. Contract: safetensors' own save_model and load_model.


def _left_out(tensors: Mapping[str, torch.Tensor], preferred: Collection[str] = ()) -> dict[str, str]:
    """Return the names of tied weights that are not saved, each with the name that is saved in its place.

    Of the names that share memory, the alphabetically first that covers the whole storage is saved, or the first such name in
    ``preferred``.

    Args:
        tensors: All tensors by name.
        preferred: Names to keep if there is a choice.

    Raises:
        RuntimeError: If no name covers the whole storage.
    """
    storages: dict[tuple[torch.device, int, int], int] = {}
    located = []
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided or tensor.device.type == "meta":
            continue  # save_file refuses it
        storage = tensor.untyped_storage()
        if storage.nbytes():
            place = storages.setdefault((tensor.device, storage.data_ptr(), storage.nbytes()), len(storages))
            located.append((place, name, tensor))
    kept_for = {}
    for names in safetensors_header.overlapping(located):
        whole = sorted(name for name in names if _is_whole(tensors[name]))
        if not whole:
            raise RuntimeError(
                f"tensors {', '.join(map(repr, sorted(names)))} are parts of a larger storage, of which no name has all: save"
                " clones of them, by save_file, or use a .pt"
            )
        kept = next((name for name in whole if name in preferred), whole[0])
        kept_for.update({name: kept for name in sorted(names) if name != kept})
    return kept_for


def _is_whole(tensor: torch.Tensor) -> bool:
    """Return whether the tensor covers its whole storage."""
    storage = tensor.untyped_storage()
    return tensor.data_ptr() == storage.data_ptr() and tensor.nbytes == storage.nbytes()
