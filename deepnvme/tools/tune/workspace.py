"""Temporary directories of measurements. One that a killed run has left is removed by the next run in the folder."""

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


class Unsuitable(Exception):
    """Raised if a measurement is not possible on this machine. The message says why and what to do, in one line."""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type's name if it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


@contextlib.contextmanager
def workspace(folder: Path, prefix: str) -> Iterator[Path]:
    """Make a temporary directory in a folder, and remove it with its content at the end.

    If the process is killed before that, the next :func:`remove_abandoned` in the folder removes it: the directory has a file
    that this process keeps locked, and names this machine once it is locked.

    Args:
        folder: Where to make it.
        prefix: Beginning of its name: "ds_nvme_tune-", "ds_io-" or ".deepnvme-".

    Raises:
        Unsuitable: If it cannot be made.
    """
    try:
        directory = tempfile.TemporaryDirectory(prefix=prefix, dir=folder)
    except OSError as error:
        raise Unsuitable(f"'{folder}' cannot be written to: {error.strerror}; choose a directory that you can write") from error
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
    """Return what tells this machine from others: its name, and which of its starts this is. In a container only that counts."""
    return {socket.gethostname(), _BOOT.read_text().strip()}


def remove_abandoned(folder: Path) -> None:
    """Remove temporary directories of runs on this machine that were killed, and warn of each (RuntimeWarning).

    What cannot be removed is left.

    Args:
        folder: Where runs made them.
    """
    with contextlib.suppress(PermissionError):  # of a folder that can be written to, but not be listed
        for path in sorted(folder.iterdir()):
            with contextlib.suppress(OSError):
                if _remove_if_abandoned(path):
                    warnings.warn(f"removed '{path}', left behind by a run that was killed", RuntimeWarning, stacklevel=2)


def _remove_if_abandoned(path: Path) -> bool:
    """Remove a directory if it surely is one of ours that nobody uses any more, and return whether it was removed.

    That is a directory of this user with such a name, whose owner's file is of this machine and not locked by any process. The
    locks of other machines are not seen on every network file system.

    Raises:
        OSError: If it is in use, or cannot be removed.
    """
    if not _NAME.fullmatch(path.name) or path.is_symlink() or not path.is_dir() or path.stat().st_uid != os.geteuid():
        return False
    with open_descriptor(path / _OWNER, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK) as owner:
        if _this_machine().isdisjoint(os.read(owner, 4096).decode(errors="replace").split()):
            return False
        fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path)
    return True
