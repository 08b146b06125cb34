"""An object saved as an ordinary .pt file, at the speed of the drive."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import IO, TYPE_CHECKING

from torch.serialization import save as torch_save  # torch.save may be deepnvme.save by now

from deepnvme._progress import Progress, Wanted, following
from deepnvme.memory.pool import BufferPool, buffer_pool

from ._shared_engine import shared_engine
from .background import raise_unseen, wait_for_saves
from .destination import Destination
from .formats.archive import archive
from .formats.file_image import FileImage
from .formats.sharding import Across
from .parallel import save_together
from .writing import write

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def save(
    obj: object,
    f: str | os.PathLike[str] | IO[bytes],
    pickle_module: ModuleType = pickle,
    pickle_protocol: int = 2,
    _use_new_zipfile_serialization: bool = True,
    _disable_byteorder_record: bool = False,
    *,
    fsync: bool = True,
    checksum: bool = False,
    pool: BufferPool | None = None,
    progress: Wanted = None,
    group: ProcessGroup | None = None,
) -> None:
    """Save ``obj`` to the file ``f`` as ``torch.save`` does; any ``torch.load`` reads it, with ``mmap=True`` too. Blocks.

    The file appears under its name when it is whole: at any error, kill or power cut the name has the old file or the new one.

    The arguments are those of ``torch.save``, by their names and in their order, so that ``torch.save = deepnvme.save`` works.
    What is no path, a file object, is left to ``torch.save``, and so are the older format and a file without the record of the
    byte order.

    ``fsync``: have it on stable storage before that. Without, a power cut can leave less than a whole file.
    ``checksum``: write the CRC-32 of each tensor, 0.4 s of one core for each GB, for :func:`verify` and ``unzip -t``; 0 stands
    there otherwise. ``progress``: True for a bar on stderr, where that is a terminal, or a function that is called
    with the bytes written and those of the file.

    ``group``: of torch.distributed; collective. All ranks hold the same object, of a DTensor each its shard, and write the file
    together, each as many bytes as another: an ordinary file, with the whole tensor for a DTensor, and with CUDA devices numbered
    as they come. Compared are the objects' structure, sizes and what is no tensor; not the tensors' bytes. A rank that fails
    makes all raise: itself its error, the others RuntimeError naming it; ValueError where the objects differ, or for a DTensor
    that is Partial. See docs/checkpoints.md for file systems that several machines share.

    Memory beyond the object: 16 MiB leased from ``pool``, by default the process's. Raises what pickling raises, before anything
    is created; OSError naming the file, ENOSPC before a byte is written; OutOfBuffers; before all, the failure of an earlier
    :func:`async_save` that nobody has looked at.
    """
    in_its_way = _use_new_zipfile_serialization and not _disable_byteorder_record
    if not (in_its_way and isinstance(f, (str, bytes, os.PathLike))):
        if checksum or group is not None:
            raise ValueError("checksum and group are for the path of a file, in torch's format of 1.6 and later")
        torch_save(obj, f, pickle_module, pickle_protocol, _use_new_zipfile_serialization, _disable_byteorder_record)
        return

    def make(across: Across | None) -> FileImage:
        return archive(obj, pickle_module, pickle_protocol, checksum, across=across)

    if progress is True and group is not None and group.rank() != 0:
        progress = None  # one bar for all
    with following(progress, f"saving {f}") as told:
        save_to(Destination(Path(f), fsync), make, pool, told, group)


def save_to(
    destination: Destination,
    make: Callable[[Across | None], FileImage],
    pool: BufferPool | None,
    progress: Progress | None = None,
    group: ProcessGroup | None = None,
) -> None:
    """Write and publish the image that ``make`` makes, after those under way to the same path. Blocks."""
    if group is not None:
        save_together(destination, lambda: make(Across()), pool, progress, group)
        return
    raise_unseen()
    image = make(None)
    wait_for_saves(destination.path)
    with destination.begin(image.nbytes) as new:
        write(image, new.file, shared_engine(), buffer_pool() if pool is None else pool, progress=progress)
        new.publish()
    destination.end()
