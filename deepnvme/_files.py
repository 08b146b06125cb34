"""Errors that name their file, and small files that somebody else may have put there: an archive can unpack to links, devices and
FIFOs too."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator


@contextlib.contextmanager
def naming_file(path: str | os.PathLike[str]) -> Iterator[None]:
    """Have an OSError that names no file name this one, as do those of calls on a descriptor."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = os.fspath(path)
        raise


class UnfitFile(ValueError):
    """A file is not one that can be read whole; the message says why."""


def read_regular(path: str | os.PathLike[str], most: int) -> bytes:
    """Read a whole regular file of at most ``most`` bytes. Blocks for the drive only: a FIFO without a writer, and a device
    without an end, are refused and not read.

    A symbolic link is followed. Of a file that grows meanwhile, the bytes are returned that it had when it was opened.

    Raises:
        UnfitFile: If it is no regular file, or has more than ``most`` bytes.
        OSError: From opening and reading, naming the file: FileNotFoundError, IsADirectoryError and so on.
    """
    with naming_file(path), open(path, "rb", opener=_open) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise UnfitFile("it is no regular file")
        if status.st_size > most:
            raise UnfitFile(f"it has {status.st_size} bytes, and may have {most}")
        return file.read(status.st_size)


def _open(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY)
