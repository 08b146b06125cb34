"""An object saved as an ordinary .pt file, at the speed of the drive."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from types import ModuleType

from deepnvme.swap.buffers import BufferPool, buffer_pool

from ._engine import shared_engine
from .archive import archive
from .background import raise_unseen, wait_for_saves
from .publication import Publication
from .writing import Progress, write


def save(
    obj: object,
    path: str | os.PathLike[str],
    *,
    fsync: bool = True,
    checksum: bool = False,
    pickle_module: ModuleType = pickle,
    pickle_protocol: int = 2,
    pool: BufferPool | None = None,
    progress: Progress | None = None,
) -> None:
    """Save ``obj`` to ``path`` as ``torch.save`` does; any ``torch.load`` reads it, with ``mmap=True`` too. Blocks.

    The file appears under its name when it is whole: at any error, kill or power cut the name has the old file or the new one.

    ``fsync``: have it on stable storage before that. Without, a power cut can leave less than a whole file.
    ``checksum``: write the CRC-32 of each tensor, 0.4 s of one core for each GB, for :func:`verify` and ``unzip -t``; 0 stands
    there otherwise. ``progress``: called with the bytes written and those of the file.

    Memory beyond the object: 16 MiB leased from ``pool``, by default the process's. Raises what pickling raises, before anything
    is created; OSError naming ``path``, ENOSPC before a byte is written; OutOfBuffers; before all, the failure of an earlier
    :func:`async_save` that nobody has looked at.
    """
    raise_unseen()
    image = archive(obj, pickle_module, pickle_protocol, checksum)
    engine = shared_engine()
    wait_for_saves(path)
    with Publication(Path(path), image.nbytes, engine, fsync=fsync) as new:
        write(image, new.file, engine, buffer_pool() if pool is None else pool, progress=progress)
        new.publish()
