"""Detect that a file was replaced while it was being read.

Loading opens a path more than once, and other processes may publish a new file under it meanwhile. What is loaded must come
from one file.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

from deepnvme._files import naming_file

T = TypeVar("T")
Path = str | os.PathLike[str]
Version = tuple[int, ...]
"""Identifies the contents of a path: unchanged as long as nobody replaces the file or writes into it."""


def read_consistently(path: Path, load: Callable[[], T]) -> T:
    """Call ``load`` until the file was not replaced during the call, and return its result.

    Args:
        path: The file that ``load`` reads. Its OSErrors that name no file are made to name this one.
        load: Reads the file. Called again after a replacement, also if it raised.

    Raises:
        Exception: What ``load`` raised, if the file was not replaced during that call.
    """
    while True:
        version = version_of(path)
        try:
            with naming_file(path):
                loaded = load()
        except Exception:
            if not _replaced(path, version):
                raise
        else:
            if not _replaced(path, version):
                return loaded
            del loaded  # frees the memory for the next attempt


@contextlib.contextmanager
def unless_replaced(versions: Mapping[Path, Version], what: str) -> Iterator[None]:
    """Raise OSError (ESTALE) after the block if one of the files was replaced during it, for callers that cannot start again.

    Args:
        versions: The files with their versions from before the block, see :func:`version_of`.
        what: What was replaced, for the message: "the checkpoint".

    Raises:
        OSError: ESTALE, if a file was replaced. An exception of the block becomes its cause.
    """
    try:
        yield
    except Exception as error:
        _refuse_replaced(versions, what, error)
        raise
    _refuse_replaced(versions, what, None)


def _refuse_replaced(versions: Mapping[Path, Version], what: str, cause: Exception | None) -> None:
    replaced = next((path for path, version in versions.items() if _replaced(path, version)), None)
    if replaced is not None:
        raise OSError(errno.ESTALE, f"{what} was replaced while it was read: load it again", os.fspath(replaced)) from cause


def version_of(path: Path) -> Version:
    """Return the current version of a file. Raises OSError if there is no such file."""
    status = os.stat(path)
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _replaced(path: Path, version: Version) -> bool:
    """Return whether the path now has another version. A file that was removed was not replaced."""
    try:
        return version_of(path) != version
    except FileNotFoundError:
        return False
