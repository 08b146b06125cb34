"""Errors that name their file, files replaced as a whole, names flushed to stable storage, and reading small files: the kernel's,
and such as are not trusted, since an unpacked archive can contain links, devices and FIFOs too.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from deepnvme._interrupts import defer_interrupts


@contextlib.contextmanager
def naming_file(path: str | os.PathLike[str], instead: bool = False) -> Iterator[None]:
    """Add ``path`` to an OSError raised in this block that names no file, such as one of a call on a descriptor.

    Args:
        path: The file.
        instead: Also in place of what the error names, such as a temporary file beside this one.
    """
    try:
        yield
    except OSError as error:
        if error.errno is not None and (instead or error.filename is None):
            error.filename = os.fspath(path)
            if error.filename2 is not None:
                del error.filename2  # None would be printed as a second name
        raise


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str], new: str | os.PathLike[str]) -> Iterator[None]:
    """Replace a file atomically by a new one, which is written in this block. If that fails, the new one is removed.

    Args:
        path: The file to replace; it may not exist.
        new: The new file, on the same file system.
    """
    try:
        yield
        os.rename(new, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(new)
        raise


class UnfitFile(ValueError):
    """A file is not a regular one, or is larger than allowed; the message says which."""


def read_regular(path: str | os.PathLike[str], most: int) -> bytes:
    """Read a whole regular file of at most ``most`` bytes.

    Blocks only for the drive: FIFOs without a writer and devices without an end are refused, not read. A symbolic link is
    followed. If the file grows meanwhile, only the bytes that it had when it was opened are returned.

    Args:
        path: The file to read.
        most: Most bytes that the file may have.

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


def open_regular(path: str | os.PathLike[str]) -> io.BufferedReader:
    """Open a file for reading that a user has named. Never waits for a FIFO's writer.

    Raises:
        OSError: From opening. EINVAL for a FIFO, a device or a socket; IsADirectoryError.
    """
    file = open(path, "rb", opener=_open)  # noqa: SIM115  the caller closes it
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "it is no regular file", os.fspath(path))
    return file


def lines_of(file: Path) -> list[str]:
    """Return the lines of one of the kernel's files, in /proc or /sys, without empty ones; none if it cannot be read.

    Lines end at line feeds only: names in them can have other characters that ``str.splitlines`` takes for ends.
    """
    try:
        return [line for line in os.fsdecode(file.read_bytes()).split("\n") if line]
    except OSError:
        return []


def sync_directory(directory: Path) -> None:
    """Flush the names in the directory to stable storage. Blocks. Raises OSError naming the directory."""
    with naming_file(directory, instead=True), defer_interrupts():  # no object would close the descriptor after a Ctrl-C
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _open(path: str, flags: int) -> int:
    """Open without waiting for a FIFO's writer, and without making a terminal the process's own."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY)
