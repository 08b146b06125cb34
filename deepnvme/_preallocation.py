"""Space of a file, taken before it is written to."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


def preallocate(descriptor: int, begin: int, end: int, path: str, remedy: str) -> None:
    """Have [begin, end) of a file that ends at ``begin`` preallocated, as zeros.

    Raises OSError naming ``path``, the bytes wanted and those free, with ``remedy`` if they are too few; the file is as it was
    then. Where the file system cannot preallocate, the file is only made longer.
    """
    nbytes = end - begin
    if nbytes <= 0:
        return
    error = errno.ENOSPC
    if nbytes <= free_bytes(descriptor, path):  # ext4 takes a while to find out, and all that is left meanwhile
        error = errno.EINTR
        while error == errno.EINTR:
            error = 0 if _libc.fallocate(descriptor, 0, begin, nbytes) == 0 else ctypes.get_errno()
    if error in (errno.EOPNOTSUPP, errno.ENOSYS):  # nfs before 4.2, zfs: written to where there is room then
        error = 0
        try:
            os.ftruncate(descriptor, end)
        except OSError as failed:
            error = failed.errno or errno.EIO
    if error:
        free = free_bytes(descriptor, path)
        with contextlib.suppress(OSError):
            os.ftruncate(descriptor, begin)  # what was allocated before it failed
        text = f"{os.strerror(error)}: {nbytes} more bytes wanted, {free} free"
        raise OSError(error, f"{text}; {remedy}" if error == errno.ENOSPC else text, path)


def free_bytes(descriptor: int, path: str) -> int:
    """That the file's file system has left for this user. Raises OSError naming ``path``."""
    try:
        status = os.fstatvfs(descriptor)
    except OSError as error:
        error.filename = path
        raise
    return status.f_bavail * status.f_frsize
