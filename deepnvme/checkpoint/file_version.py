"""What is read from a file by its name, more than once, is to be of one file: others publish new ones under that name."""

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
"""Equal as long as nobody replaces the file or writes into it."""


def read_consistently(path: Path, load: Callable[[], T]) -> T:
    """What ``load`` returns, or raises, of a file that was not replaced meanwhile: called again until then. Errors name it."""
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
            del loaded  # the memory is for the next one


@contextlib.contextmanager
def unless_replaced(versions: Mapping[Path, Version], what: str) -> Iterator[None]:
    """For who cannot begin again: raises OSError (ESTALE) saying that ``what`` was replaced if any of the files was, in place of
    what was raised meanwhile."""
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
    status = os.stat(path)
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _replaced(path: Path, version: Version) -> bool:
    """By another file; one that has been removed was not."""
    try:
        return version_of(path) != version
    except FileNotFoundError:
        return False
