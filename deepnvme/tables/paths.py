"""Paths that a user has given: one, or several."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from deepnvme.profiles import AnyPath

__all__ = ["AnyPath", "as_paths"]


def as_paths(paths: AnyPath | Iterable[AnyPath]) -> list[Path]:
    """Return one path, or several, as a list. Paths that are bytes are decoded as the file system's names are."""
    given = [paths] if isinstance(paths, str | bytes | os.PathLike) else list(paths)
    return [Path(os.fsdecode(each)) for each in given]
