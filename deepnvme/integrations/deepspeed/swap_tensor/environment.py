"""The rank of this process, and the folder that each swapper has for its files."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import logging
import os
import weakref
from pathlib import Path

import torch.distributed as dist

from deepnvme.files.directory_lock import lock
from deepnvme.telemetry.descriptions import printable

_logger = logging.getLogger(__name__)

_MOST_JOBS = 1000


def rank() -> int:
    """Return this process's rank in torch.distributed; 0 if that is not initialized."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def claim_folder(swapper: object, folder: str) -> str:
    """Return a folder that no other swapper uses: ``folder``, or else the first free ``folder-job-N``. It is created if missing.

    DeepSpeed names the files in it by parameter only: two jobs in one folder would train with each other's states. The folder is
    locked by a file beside it until the swapper is dropped or its process ends.

    Raises:
        OSError: If the folder cannot be made or locked; names the path.
    """
    for number in range(1, _MOST_JOBS + 1):
        own = folder if number == 1 else f"{folder}-job-{number}"
        os.makedirs(own, exist_ok=True)
        path = f"{own}.lock"
        with contextlib.suppress(FileExistsError):
            io.FileIO(path, "x").close()
        file = io.FileIO(path)  # read-only: the file may be another user's, and not writable
        weakref.finalize(swapper, file.close).atexit = False  # until the process has ended, others may still write there
        try:
            lock(file.fileno(), fcntl.LOCK_EX, Path(path))
        except BlockingIOError:
            file.close()
            continue
        if number > 1:
            _logger.warning("'%s' is in use by another job: the files of this one are in '%s'", printable(folder), printable(own))
        return own
    raise OSError(errno.EBUSY, f"{_MOST_JOBS} jobs are using it: choose another nvme_path", folder)
