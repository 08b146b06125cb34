"""Save any object as an ordinary .pt file, at the speed of the drive."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import IO, TYPE_CHECKING

import torch
from torch.serialization import save as torch_save  # deepnvme.save may have replaced torch.save

from deepnvme._former_names import former_names
from deepnvme.memory.pool import buffer_pool
from deepnvme.telemetry.progress import ProgressOption, shown_progress

from .background import raise_unseen, wait_for_saves
from .file_io import write
from .formats.file_image import FileImage
from .formats.pt_image import pt_image
from .formats.sharding import JointPickling
from .parallel import save_together
from .publication import Destination

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from deepnvme.drives.aio_config import AioConfig


@former_names(config="aio_config")
def save(
    obj: object,
    f: str | os.PathLike[str] | IO[bytes],
    pickle_module: ModuleType = pickle,
    pickle_protocol: int = 2,
    _use_new_zipfile_serialization: bool = True,
    _disable_byteorder_record: bool = False,
    *,
    fsync: bool = True,
    checksum: bool | None = None,
    progress: ProgressOption = None,
    group: ProcessGroup | None = None,
    aio_config: AioConfig | None = None,
) -> None:
    """Save ``obj`` to the file ``f`` like ``torch.save``. Blocks.

    Any ``torch.load`` reads the file, also with ``mmap=True``. The file appears under its name when it is whole: after any
    error, kill or power cut the name refers to the old file or to the new one.

    The arguments of ``torch.save`` have the same names and order, so ``torch.save = deepnvme.save`` works. ``torch.save``
    itself is called for file objects, another ``pickle_module`` than Python's, the format before torch 1.6, and files without
    the byte order record. ``fsync``, ``progress`` and ``aio_config`` then have no effect.

    With a ``group`` the save is collective: every rank calls it with the same object, in which each DTensor has the
    rank's shard. The ranks write one ordinary file together: each rank its shards, and the first rank also everything that is
    not a DTensor. The file has the whole tensor for a DTensor, and CUDA devices are numbered in the order in which they occur in
    the object. The ranks compare the structure of their objects, the sizes and the values that are not tensors, but not the
    bytes of tensors. If one rank fails, all raise: the failed rank its own error, the others RuntimeError naming it. See
    docs/checkpoints-ranks.md for file systems shared by several machines.

    Memory beyond the object: 16 MiB leased from the process's pool.

    Args:
        obj: Any object that pickles.
        f: Path, or a file object.
        pickle_module: As for ``torch.save``, which is called if this is not Python's ``pickle``.
        pickle_protocol: As for ``torch.save``.
        _use_new_zipfile_serialization: As for ``torch.save``, which is called if this is False.
        _disable_byteorder_record: As for ``torch.save``, which is called if this is True.
        fsync: Flush the file to stable storage before it gets its name. Without this, a power cut can leave less than a
            whole file.
        checksum: Whether the file has the CRC-32 of each tensor, for :func:`verify`, ``unzip -t`` and others, or 0 instead.
            None: CRC-32 of tensors on the CPU, computed during writing; 0 for tensors on devices, and for all with ``group``.
            True: CRC-32 of all tensors, computed before writing for tensors on devices, and for all with ``group``. False: 0
            for all. After ``torch.serialization.set_crc32_options(False)``, None means 0 for all tensors and the pickle, as in
            torch.save.
        progress: None shows a progress bar on stderr after two seconds, if stderr is a terminal or a notebook's; True
            shows one from the beginning, False shows none; a function is called with (bytes written, bytes of the file).
        group: Process group of ``torch.distributed`` whose ranks write the file together.
        aio_config: Settings of the engine; None for the profile of the drive, see :func:`deepnvme.engine_for`.

    Raises:
        Exception: Whatever pickling raises, before anything is created; or, first of all, the error of an earlier
            :func:`async_save` that was not reported yet.
        OSError: From writing, naming the file. ENOSPC is raised before a byte is written.
        OutOfBuffers: If the pool's budget does not allow the buffers.
        ValueError: If the ranks' objects differ or a DTensor is Partial; if ``checksum`` is given for an object with
            DTensors; or if ``checksum`` or ``group`` is given where ``torch.save`` is called.
        RuntimeError: If another rank failed.
        TypeError: If ``aio_config`` is not an AioConfig.
    """
    ours = _use_new_zipfile_serialization and not _disable_byteorder_record and pickle_module is pickle
    if not (ours and isinstance(f, (str, bytes, os.PathLike))):
        if checksum or group is not None:
            raise ValueError("checksum and group are for paths of files, torch's format of 1.6 and later, and Python's pickle")
        torch_save(obj, f, pickle_module, pickle_protocol, _use_new_zipfile_serialization, _disable_byteorder_record)
        return

    make = partial(pt_image, obj, pickle_protocol, checksum)
    save_to(Destination(Path(f), fsync, aio_config=aio_config), make, progress, group)


def save_to(
    destination: Destination,
    make: Callable[[JointPickling | None], FileImage],
    progress: ProgressOption = False,
    group: ProcessGroup | None = None,
) -> None:
    """Write and publish an image, after the background saves to the same path have ended. Blocks.

    Args:
        destination: Where the file is published.
        make: Returns the image. Its argument is None or, with a group, the state by which all ranks write the same pickle.
        progress: As for :func:`save`. Of the ranks of a group only the first shows a progress bar.
        group: Process group whose ranks write the file together.
    """
    if group is not None and not callable(progress) and torch.distributed.get_rank(group) != 0:  # -1 on ranks outside of it
        progress = False
    with shown_progress(progress, f"saving {destination.path}") as report:
        if group is not None:
            save_together(destination, lambda: make(JointPickling()), report, group)
            return
        raise_unseen()
        image = make(None)
        wait_for_saves(destination.path)
        engine = destination.engine()
        destination.publish(engine, image.nbytes, lambda file: write(image, file, engine, buffer_pool(), progress=report))
