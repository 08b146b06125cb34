"""Open a store in a directory that no other process uses, below one that several processes are given."""

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
    """Open a store in directories named ``prefix-0``, or the next number that nobody uses, one below each path.

    What processes that have died have left under such names is removed.

    Args:
        paths: Directories, created if they are missing. The store is striped over them.
        prefix: Beginning of the names.
        engine: The store's engine.
        owner: The object that the store is a part of.
        collect: Whether to collect garbage if an object of this process has the first number, so that what a loop makes does not
            fill the drive before the interpreter collects it.

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
    """Remove a closed store's directories if they are empty. A store removes only those that it has created itself."""
    for directory in directories:
        with contextlib.suppress(OSError):
            os.rmdir(directory)
