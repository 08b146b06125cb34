"""Opens a store in a new directory of its own, inside a directory that several processes use."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
from collections.abc import Iterable
from pathlib import Path

from deepnvme.engine import Engine
from deepnvme.files.directory_lock import DirectoryOwner, StoreLocked, is_locked_here

from .tensor_store import TensorStore


def open_own_store(
    paths: Iterable[Path], prefix: str, engine: Engine, owner: DirectoryOwner, *, collect: bool = False
) -> tuple[TensorStore, list[Path]]:
    """Open a store in ``prefix-0`` below each path, or in ``prefix-1`` and so on if a lower number is in use.

    Directories with this prefix that dead processes have left are removed.

    Args:
        paths: Directories, created if they are missing. The store is striped over them.
        prefix: Beginning of the names of the store's directories.
        engine: The store's engine.
        owner: The object that the store is a part of.
        collect: Whether to run the garbage collector first if a store of this process has number 0. Otherwise the stores that
            a loop makes and drops could fill the drive before the interpreter collects them.

    Returns:
        The store, and its directories. Remove them with :func:`remove_directories` when the store is closed.

    Raises:
        OSError: From creating and opening files.
    """
    paths = list(paths)
    if collect and any(is_locked_here(path / f"{prefix}-0") for path in paths):
        gc.collect()
    for number in itertools.count():
        own = [path / f"{prefix}-{number}" for path in paths]
        if any(map(is_locked_here, own)):
            continue
        try:
            store = TensorStore(own, engine=engine, owner=owner)
        except StoreLocked:
            continue
        for left in (each for path in paths for each in path.glob(f"{prefix}-*") if each not in own):
            if is_locked_here(left):
                continue
            with contextlib.suppress(OSError):  # in use, or another user's
                TensorStore(left, engine=engine, owner=owner).close()  # which removes what a dead owner has left
                os.rmdir(left)
        return store, own
    raise AssertionError


def remove_directories(directories: Iterable[Path]) -> None:
    """Remove the empty ones among a closed store's directories.

    Closing a store removes only directories that the store itself has created, and not one that a dead process has left.
    """
    for directory in directories:
        with contextlib.suppress(OSError):
            os.rmdir(directory)
