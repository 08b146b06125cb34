"""Temporary directories for measurements. If a run is killed, the next run in the same folder removes its directory."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import socket
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

from deepnvme.tools.report import open_descriptor

_NAME = re.compile(r"(ds_nvme_tune-|ds_io-|\.deepnvme-)[a-z0-9_]{8}")  # eight characters are what tempfile adds
_OWNER = "owner"
_BOOT = Path("/proc/sys/kernel/random/boot_id")


class NotMeasurable(Exception):
    """Raised if a measurement is not possible on this machine. The message says why and what to do, in one line."""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type's name if it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


@contextlib.contextmanager
def workspace(folder: Path, prefix: str) -> Iterator[Path]:
    """Create a temporary directory in a folder, yield it, and remove it with its content at the end.

    If the process is killed before that, the next :func:`remove_abandoned` in the folder removes the directory. To tell whether
    it is in use, the directory has a file that this process keeps locked, and that names this machine.

    Args:
        folder: Folder for the directory.
        prefix: Beginning of the directory's name: "ds_nvme_tune-", "ds_io-" or ".deepnvme-".

    Raises:
        NotMeasurable: If the directory cannot be created.
    """
    try:
        directory = tempfile.TemporaryDirectory(prefix=prefix, dir=folder)
    except OSError as error:
        raise NotMeasurable(
            f"'{folder}' cannot be written to: {error.strerror}; choose a directory that you can write"
        ) from error
    try:
        with directory as path, open_descriptor(Path(path, _OWNER), os.O_WRONLY | os.O_CREAT | os.O_EXCL) as owner:
            # On a full disk, or one without locks, the directory is never taken for an abandoned one.
            with contextlib.suppress(OSError):
                fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.write(owner, " ".join(_this_machine()).encode())
            yield Path(path)
    finally:
        directory.cleanup()  # again, in case an interrupt came during the first: removing large files takes seconds


def _this_machine() -> set[str]:
    """Return the machine's host name and its boot id. In a container, where host names may change, the boot id identifies it."""
    return {socket.gethostname(), _BOOT.read_text().strip()}


def remove_abandoned(folder: Path) -> None:
    """Remove temporary directories of killed runs on this machine, and warn of each (RuntimeWarning).

    A directory that cannot be removed is left.

    Args:
        folder: Folder in which the runs created them.
    """
    with contextlib.suppress(PermissionError):  # of a folder that can be written to, but not be listed
        for path in sorted(folder.iterdir()):
            with contextlib.suppress(OSError):
                if _remove_if_abandoned(path):
                    warnings.warn(f"removed '{path}', left behind by a run that was killed", RuntimeWarning, stacklevel=2)


def _remove_if_abandoned(path: Path) -> bool:
    """Remove a directory if a killed run has left it, and return whether it was removed.

    The directory must have the name of a measurement's directory and belong to this user. Its owner file must name this machine
    and not be locked by any process. Directories of other machines are left, because some network file systems do not share
    locks.

    Raises:
        OSError: If the directory is in use, or cannot be removed.
    """
    if not _NAME.fullmatch(path.name) or path.is_symlink() or not path.is_dir() or path.stat().st_uid != os.geteuid():
        return False
    with open_descriptor(path / _OWNER, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK) as owner:
        if _this_machine().isdisjoint(os.read(owner, 4096).decode(errors="replace").split()):
            return False
        fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path)
    return True
