"""Replace files atomically, flush directories to stable storage, and add the file's name to errors."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from deepnvme._interrupts import defer_interrupts


@contextlib.contextmanager
def with_filename(path: str | os.PathLike[str], instead: bool = False) -> Iterator[None]:
    """Add ``path`` to an OSError that the ``with`` block raises without a filename, for example from a call on a descriptor.

    Args:
        path: The file.
        instead: Whether ``path`` also replaces a filename that the error has, such as that of a temporary file.
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
    """Replace a file atomically by a new one, which the ``with`` block writes.

    If the block or the renaming fails, the new file is removed.

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


def replace_durably(path: Path, data: bytes) -> None:
    """Replace a file by one with these bytes, atomically and durably. Blocks.

    After a crash at any point the path refers to the old file or to the new one, and the file is whole. A crash can leave
    ``path.new`` behind, which the next replacement removes. Callers must hold a lock, since two replacements at a time would
    write the same file.

    Raises:
        OSError: Naming ``path``. The old file is still there, unless the message says that it was replaced.
    """
    new = path.with_name(path.name + ".new")
    with with_filename(path, instead=True), contextlib.suppress(FileNotFoundError):
        os.unlink(new)  # never written through: it may be a link, or a FIFO that nobody reads
    with with_filename(path, instead=True), replacing(path, new), open(new, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    try:
        sync_directory(path.parent)  # makes the new name durable
    except OSError as error:
        text = f"{error.strerror}: it was replaced, but its directory could not be flushed: after a crash it may be the old one"
        raise OSError(error.errno, text, str(path)) from error


def sync_directory(directory: Path) -> None:
    """Flush a directory, with the names in it, to stable storage. Blocks. Raises OSError naming the directory."""
    with with_filename(directory, instead=True), defer_interrupts():  # no object would close the descriptor after a Ctrl-C
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
