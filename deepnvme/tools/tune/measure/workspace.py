"""Temporary directories of measurements. One that a killed run has left is removed by the next run in the folder."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import socket
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

from .unsuitable import Unsuitable

PREFIXES = ("ds_nvme_tune-", "ds_io-", ".deepnvme-")
"""Beginnings of the names of temporary directories."""
_NAME = re.compile(rf"({'|'.join(map(re.escape, PREFIXES))})[a-z0-9_]{{8}}")  # what tempfile adds to them
_OWNER = "owner.json"
_BOOT = Path("/proc/sys/kernel/random/boot_id")


@contextlib.contextmanager
def workspace(folder: Path, prefix: str) -> Iterator[Path]:
    """Make a temporary directory in a folder, and remove it with its content at the end.

    If the process is killed before that, the next :func:`remove_abandoned` in the folder removes it.

    Args:
        folder: Where to make it.
        prefix: Beginning of its name, one of :data:`PREFIXES`.

    Raises:
        Unsuitable: If it cannot be made.
    """
    try:
        directory = tempfile.TemporaryDirectory(prefix=prefix, dir=folder)
    except OSError as error:
        raise Unsuitable(f"'{folder}' cannot be written to: {error.strerror}; choose a directory that you can write") from error
    try:
        with directory as path, _owned(Path(path)):
            yield Path(path)
    finally:
        directory.cleanup()  # again, in case an interrupt came during the first: removing large files takes seconds


@contextlib.contextmanager
def _owned(directory: Path) -> Iterator[None]:
    """Keep a locked file in a directory that says whose it is. The kernel removes the lock when this process ends, however."""
    new = directory / f"{_OWNER}.new"
    descriptor = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        # On a full disk, or one without locks, the directory is never taken for an abandoned one.
        with contextlib.suppress(OSError):
            os.write(descriptor, json.dumps({**_this_machine(), "pid": os.getpid()}).encode())
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.rename(new, directory / _OWNER)  # so that whoever sees the file finds it locked
        yield
    finally:
        os.close(descriptor)


def _this_machine() -> dict[str, str]:
    """Return what tells this machine from others: its name, and which of its starts this is."""
    with contextlib.suppress(OSError):
        return {"host": socket.gethostname(), "boot": _BOOT.read_text().strip()}
    return {"host": socket.gethostname()}


def remove_abandoned(folder: Path) -> None:
    """Remove temporary directories of runs on this machine that were killed, and warn of each (RuntimeWarning).

    What cannot be removed is left.

    Args:
        folder: Where runs made them.
    """
    with contextlib.suppress(PermissionError):  # of a folder that can be written to, but not be listed
        for path in sorted(folder.iterdir()):
            with contextlib.suppress(OSError, ValueError):
                if _remove_if_abandoned(path):
                    warnings.warn(f"removed '{path}', left behind by a run that was killed", RuntimeWarning, stacklevel=2)


def _remove_if_abandoned(path: Path) -> bool:
    """Remove a directory if it surely is one of ours that nobody uses any more, and return whether it was removed.

    That is a directory of this user with such a name, in which the file that :func:`workspace` makes is of this machine and not
    locked by any process.

    Raises:
        OSError: If it is in use, or cannot be removed.
        ValueError: If the file has another content.
    """
    if not _NAME.fullmatch(path.name) or path.is_symlink() or not path.is_dir() or path.stat().st_uid != os.geteuid():
        return False
    descriptor = os.open(path / _OWNER, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        owner, here = json.loads(os.read(descriptor, 4096)), _this_machine()
        # Other machines' locks are not seen on every network file system. In a container, only the start tells the machine.
        if not isinstance(owner, dict) or all(owner.get(name) != here[name] for name in here):
            return False
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path)
    finally:
        os.close(descriptor)
    return True
