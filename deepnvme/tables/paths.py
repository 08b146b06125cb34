"""Paths that a user has given: one, or several."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from deepnvme.drives.profiles import AnyPath

__all__ = ["AnyPath", "as_directories", "as_paths"]


def as_paths(paths: AnyPath | Iterable[AnyPath]) -> list[Path]:
    """Return one path, or several, as a list. Paths that are bytes are decoded as the file system's names are."""
    given = [paths] if isinstance(paths, str | bytes | os.PathLike) else list(paths)
    return [Path(os.fsdecode(each)) for each in given]


def as_directories(paths: AnyPath | Iterable[AnyPath]) -> list[Path]:
    """Return one directory, or several, as absolute paths. Raises ValueError if there is none, or one is given twice."""
    found = [Path(os.path.abspath(each)) for each in as_paths(paths)]
    if not found:
        raise ValueError("a table needs a directory, got none")
    if len(set(found)) < len(found):
        raise ValueError(f"a directory is given twice: {', '.join(map(str, found))}")
    return found
