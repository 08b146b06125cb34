"""Storage writer for ``torch.distributed.checkpoint``: :class:`NVMeWriter` saves checkpoints at the speed of the drive.

Invariants:

1. A checkpoint exists once its metadata file has its final name. By then, every file that the metadata name is
   complete.
2. The files of an earlier checkpoint stay until the new metadata file has replaced the old one. If there is an earlier
   checkpoint, the new files therefore get a tag in their names.
3. The names of the files that are then obsolete are appended to the metadata file, after its pickle. So the next save
   also removes files that an interrupted save has left.
4. A file is removed only if its name has the form that these files have, and the name has a tag or occurs in the old
   metadata file.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX, FileSystemWriter, _split_by_size_and_type, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from deepnvme._former_names import former_names
from deepnvme.checkpoint.file_io import write
from deepnvme.checkpoint.formats.dcp_tensor import flat, frame, memory_of_item
from deepnvme.checkpoint.formats.file_image import FileImage
from deepnvme.checkpoint.publication import Destination
from deepnvme.files.regular_files import open_regular
from deepnvme.memory.alignment import PAGE
from deepnvme.memory.pool import buffer_pool
from deepnvme.transfer.gather import DIRECT_FROM

if TYPE_CHECKING:
    from deepnvme.drives.aio_config import AioConfig

Result = TypeVar("Result")

_TORCHS = "use torch's own FileSystemWriter or HuggingFaceStorageWriter"
_TAG = 8
"""Digits of the save's id in the names of its files, which get this tag if the directory has an earlier checkpoint."""
_NAME = re.compile(rf"__\d+_\d+(?P<tag>\.[0-9a-f]{{{_TAG}}})?{re.escape(DEFAULT_SUFFIX)}", re.ASCII)


class NVMeWriter(FileSystemWriter):
    """A drop-in replacement for torch's ``FileSystemWriter``: the same arguments and files, at the speed of the drive.

    >>> dcp.save(state_dict, storage_writer=NVMeWriter(path))

    torch's own reader reads the files. The checkpoint exists when its metadata file is written; until then, an earlier
    checkpoint in the same directory stays whole. This holds after any error, kill or power cut (a power cut only with
    ``sync_files``). The files of the earlier checkpoint are therefore kept until the new metadata file has its name, so there
    must be room for both.

    Each rank writes ``thread_count`` files, as with torch, but one after the other: each at the speed of the drive.

    Memory beyond the state: 16 MiB leased from the process's pool, and copies of tensors whose elements have gaps in memory.

    Errors are OSErrors naming the file; ENOSPC is raised before a byte of the file is written. ``dcp.save`` wraps them in a
    CheckpointException.

    Args:
        path: Directory of the checkpoint.
        aio_config: Settings of the engine; None for the profile of the drive, see :func:`deepnvme.engine_for`.
            The process that ``dcp.async_save`` may write in has these settings too.
        *args: As for ``FileSystemWriter``.
        **kwargs: As for ``FileSystemWriter``.

    Raises:
        ValueError: For torch's stream extensions and the safetensors format and, from saving, for quantised and sparse tensors.
            Only torch's own writers support these.
    """

    @former_names(config="aio_config")
    def __init__(self, path: str | os.PathLike[str], *args: Any, aio_config: AioConfig | None = None, **kwargs: Any) -> None:
        super().__init__(path, *args, **kwargs)
        self._aio_config = aio_config  # not the engine: a writer can be pickled, to go to another process
        extensions = getattr(getattr(self, "transforms", None), "extensions", ())  # since torch 2.7, as is the format
        if extensions or getattr(getattr(self, "serialization_format", None), "name", "") == "SAFETENSORS":
            raise ValueError(f"NVMeWriter writes neither with extensions nor safetensors: {_TORCHS}")

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's files. Called by ``dcp.save``. Blocks.

        Args:
            plan: What this rank saves.
            planner: Provides the tensors and objects.

        Returns:
            A completed future with the results of the writes.

        Raises:
            OSError: From writing, naming the file.
        """
        if self.single_file_per_rank:
            buckets = _split_by_size_and_type(self.thread_count, plan.items)
        else:
            buckets = [[item] for item in plan.items]
        ending = f".{self.save_id[:_TAG]}{DEFAULT_SUFFIX}" if self._metadata_file().exists() else DEFAULT_SUFFIX
        prefix = plan.storage_data.prefix
        files = {f"{prefix}{number}{ending}": items for number, items in enumerate(buckets) if items}
        written: list[WriteResult] = []
        for name, items in files.items():
            image, places = _image(name, items, planner)
            self._publish(image, Path(self.path) / name)
            written += places
        return done(written)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the metadata file, then remove the files of an earlier checkpoint. Called by ``dcp.save``. Blocks.

        Args:
            metadata: Metadata of the checkpoint. The places of its items are added here.
            results: For each rank, the results of its :meth:`write_data`.

        Raises:
            OSError: From writing, naming the file.
        """
        if hasattr(filesystem, "CURRENT_DCP_VERSION"):  # since torch 2.8
            metadata.version = filesystem.CURRENT_DCP_VERSION
        metadata.storage_data = {result.index: result.storage_data for rank in results for result in rank}
        metadata.storage_meta = self.storage_meta()
        file = self._metadata_file()
        now = {info.relative_path for info in metadata.storage_data.values()}
        needless = self._files_before(file) - now
        image = FileImage()
        image.add_text(pickle.dumps(metadata))
        # After the pickle, where unpickling does not look: if the process ends before these are removed, the next save finds
        # their names here.
        image.add_text("\n".join(sorted(needless)).encode())
        self._publish(image, file)
        for name in needless:
            with contextlib.suppress(OSError):  # no longer needed: the checkpoint is saved even if this cannot be removed
                (Path(self.path) / name).unlink()

    def _publish(self, image: FileImage, path: Path) -> None:
        """Write an image to a temporary file, and rename that to ``path`` when it is complete. Blocks."""
        destination = Destination(path, self.sync_files, aio_config=self._aio_config)
        engine = destination.engine()
        destination.publish(engine, image.nbytes, lambda file: write(image, file, engine, buffer_pool()))

    def _metadata_file(self) -> Path:
        """Return the path of the metadata file: one file for all ranks, or this rank's own file without collectives."""
        rank = getattr(self, "rank", None)  # since torch 2.9, as is use_collectives
        return Path(self.path) / (".metadata" if rank is None or self.use_collectives else f"__{rank}.metadata")

    def _files_before(self, metadata_file: Path) -> set[str]:
        """Return the names of the files of an earlier checkpoint in the directory, and of failed attempts to replace it.

        The old metadata file is not unpickled, since it is not trusted. A file belongs to the old checkpoint if its name has the
        form of such a file and occurs among the bytes of the metadata file.
        """
        mine = "__" if metadata_file.name == ".metadata" else f"__{self.rank}_"
        found = [_NAME.fullmatch(entry.name) for entry in Path(self.path).iterdir() if entry.name.startswith(mine)]
        tagged = {name[0] for name in found if name is not None and name["tag"]}
        untagged = {name[0] for name in found if name is not None and not name["tag"]}
        return tagged | _named_in(metadata_file, untagged)


def done(result: Result) -> Future[Result]:
    """Return an already completed future with this result."""
    future: Future[Result] = Future()
    future.set_result(result)
    return future


def _image(name: str, items: Sequence[WriteItem], planner: SavePlanner) -> tuple[FileImage, list[WriteResult]]:
    """Build the image of a file, and return it with the place of each item. As in torch's files, objects come first."""
    image = FileImage()
    places: list[tuple[WriteItem, int, int]] = []
    tensors: list[tuple[WriteItem, torch.Tensor]] = []
    for item in items:
        data = planner.resolve_data(item)
        if isinstance(data, torch.Tensor):
            tensors.append((item, data))
        else:
            places.append((item, *_add_text(image, data.getvalue())))
    places += [(item, *_add(image, item.index.fqn, tensor)) for item, tensor in tensors]
    return image, [WriteResult(item.index, nbytes, _StorageInfo(name, begin, nbytes)) for item, begin, nbytes in places]


def _add_text(image: FileImage, text: bytes) -> tuple[int, int]:
    """Append bytes. Returns their offset and length."""
    image.add_text(text)
    return image.nbytes - len(text), len(text)


def _add(image: FileImage, name: str, tensor: torch.Tensor) -> tuple[int, int]:
    """Append the archive that torch.save writes for the tensor. Returns the archive's offset and length in bytes."""
    memory = memory_of_item(tensor)
    if memory is None:
        raise ValueError(f"{name!r} is more than its elements, as a quantized or sparse tensor is: {_TORCHS}")
    head, tail = frame(memory.dtype, memory.shape, memory.stride())
    if memory.nbytes >= DIRECT_FROM:
        image.add_padding(-(image.nbytes + len(head)) % PAGE)  # direct I/O then needs no copy of page-aligned memory
    begin = image.nbytes
    image.add_text(head)
    image.add(flat(memory))
    image.add_text(tail)
    return begin, image.nbytes - begin


def _named_in(file: Path, names: set[str]) -> set[str]:
    """Return which of the names occur among the bytes of the file.

    If the file cannot be read, returns an empty set, so that no file that may still be needed is removed.
    """
    try:
        with open_regular(file) as stream:
            data = stream.read()
    except OSError:
        return set()
    return {name for name in names if name.encode() in data}
