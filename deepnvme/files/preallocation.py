"""Preallocate the space of a file before it is written."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
from pathlib import Path

from deepnvme.files.replacing import with_filename

libc = ctypes.CDLL(None, use_errno=True)
libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


def preallocate(descriptor: int, begin: int, end: int, path: str, remedy: str) -> None:
    """Extend a file from ``begin`` to ``end`` bytes, all zeros, and reserve the space on the drive.

    If the file system cannot preallocate, the file is only made longer.

    Args:
        descriptor: The file, open for writing.
        begin: The file's present size, in bytes.
        end: The file's new size, in bytes.
        path: Names the file in the error.
        remedy: Added to the error if there is too little space.

    Raises:
        OSError: With the bytes wanted and the bytes free. The file then has its former size.
    """
    nbytes = end - begin
    if nbytes <= 0:
        return
    error = errno.ENOSPC
    if nbytes <= free_bytes(descriptor, path):  # checked first: ext4 fails only after a while, having taken all the space left
        error = errno.EINTR
        while error == errno.EINTR:
            error = 0 if libc.fallocate(descriptor, 0, begin, nbytes) == 0 else ctypes.get_errno()
    if error in (errno.EOPNOTSUPP, errno.ENOSYS):  # nfs before 4.2, zfs: space is found when it is written
        error = 0
        try:
            os.ftruncate(descriptor, end)
        except OSError as failed:
            error = failed.errno or errno.EIO
    if error:
        free = free_bytes(descriptor, path)
        with contextlib.suppress(OSError):
            os.ftruncate(descriptor, begin)  # frees what was allocated before it failed
        text = f"{os.strerror(error)}: {nbytes} more bytes wanted, {free} free"
        raise OSError(error, f"{text}; {remedy}" if error == errno.ENOSPC else text, path)


def reserve(path: Path, nbytes: int, remedy: str) -> None:
    """Make a file of ``nbytes`` zeros, and reserve its space on the drive, as :func:`preallocate` does. Raises OSError."""
    with with_filename(path), open(path, "wb") as file:
        preallocate(file.fileno(), 0, nbytes, str(path), remedy)


def free_bytes(descriptor: int, path: str) -> int:
    """Return how many bytes this user can still write on the file system of the file. Raises OSError naming ``path``."""
    with with_filename(path):
        status = os.fstatvfs(descriptor)
    return status.f_bavail * status.f_frsize
