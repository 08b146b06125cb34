"""What is read from a file by its name, more than once, is to be of one file: others publish new ones under that name."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def of_one_version(path: str | os.PathLike[str], load: Callable[[], T]) -> T:
    """What ``load`` returns, or raises, of a file that was not replaced meanwhile: called again until then."""
    while True:
        version = _version(path)
        try:
            loaded = load()
        except Exception:
            if not _replaced(path, version):
                raise
        else:
            if not _replaced(path, version):
                return loaded
            del loaded  # the memory is for the next one


def _version(path: str | os.PathLike[str]) -> tuple[int, ...]:
    status = os.stat(path)
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _replaced(path: str | os.PathLike[str], version: tuple[int, ...]) -> bool:
    """By another file; one that has been removed was not."""
    try:
        return _version(path) != version
    except FileNotFoundError:
        return False
