"""Read small files that may not be regular ones, since an unpacked archive may have links and FIFOs; and files of the kernel."""

from __future__ import annotations

import errno
import io
import os
import stat
from pathlib import Path

from .replacing import with_filename


class NotARegularSmallFile(ValueError):
    """A file is not a regular one, or is larger than allowed. The message says which."""


def read_regular(path: str | os.PathLike[str], most: int) -> bytes:
    """Read a whole regular file of at most ``most`` bytes.

    Blocks only for the drive: FIFOs without a writer and devices without an end are refused, not read. A symbolic link is
    followed. If the file grows while it is read, the bytes that it had when it was opened are returned.

    Args:
        path: The file to read.
        most: Most bytes that the file may have.

    Raises:
        NotARegularSmallFile: If it is not a regular file, or has more than ``most`` bytes.
        OSError: From opening and reading, naming the file: FileNotFoundError, IsADirectoryError and so on.
    """
    with with_filename(path), open(path, "rb", opener=open_without_waiting) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise NotARegularSmallFile("it is no regular file")
        if status.st_size > most:
            raise NotARegularSmallFile(f"it has {status.st_size} bytes, and may have {most}")
        return file.read(status.st_size)


def open_regular(path: str | os.PathLike[str]) -> io.BufferedReader:
    """Open for reading a file whose path comes from the user. Accepts only regular files, and never waits for a FIFO's writer.

    Raises:
        OSError: From opening. EINVAL for a FIFO, a device or a socket; IsADirectoryError for a directory.
    """
    file = open(path, "rb", opener=open_without_waiting)  # noqa: SIM115  the caller closes it
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "it is no regular file", os.fspath(path))
    return file


def lines_of(file: Path) -> list[str]:
    """Return the lines of a file in /proc or /sys, without empty ones. An empty list if the file cannot be read.

    Only line feeds end a line: names in these files can have other characters that ``str.splitlines`` treats as line ends.
    """
    try:
        return [line for line in os.fsdecode(file.read_bytes()).split("\n") if line]
    except OSError:
        return []


def open_without_waiting(path: str, flags: int) -> int:
    """Open without waiting for a FIFO's writer, and without making a terminal the process's controlling terminal."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY)
