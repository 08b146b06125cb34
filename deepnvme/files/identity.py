"""Directories that belong together, on several drives: those of a table, or of a store. Copies and mixtures are told apart.

1. Each directory has the identity of its table or store, 32 random hexadecimal digits, and its own number. The first directory
   has the manifest. What is written also says at which path each directory was.
2. A writer takes a new identity before it first changes anything. So an original and its copy have different identities once one
   of them was changed, and directories of both together are refused.
3. While a new identity is being written, the former identities are valid beside it. Somebody lists them until all directories
   have the new one: the manifest of a table, the memberships of a store.
4. A copy that nobody has changed has the identity of its original. A mixture of both is told by the paths: some directories are
   where they were, and another one was given although it is also where it was.
5. The number says which directory it is, not the path: mounts may have exchanged their places.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path


def refuse_mixture(given: Sequence[Path], recorded: Sequence[Path | None], is_at: Callable[[int, Path], bool]) -> None:
    """Raise ValueError if some directories are where they were, and another is a copy of one that is also where it was.

    Args:
        given: The directories, in the order of their numbers.
        recorded: Where each was when its identity was written; None if nothing says that.
        is_at: Returns whether the directory of a number is at a path.
    """
    in_place = [place is not None and same_place(path, place) for path, place in zip(given, recorded, strict=True)]
    for number, (path, place) in enumerate(zip(given, recorded, strict=True)):
        if any(in_place) and not in_place[number] and place is not None and is_at(number, place):
            raise ValueError(
                f"'{path}' was given for directory {number} (from 0), which is in '{place}' still, beside directories that are"
                f" where they were: give '{place}', or a copy of each; or move '{place}' away if '{path}' takes its place"
            )


def same_place(path: Path, other: Path) -> bool:
    """Return whether two paths are the same directory. False if one does not exist, or cannot be read."""
    try:
        return os.path.samefile(path, other)
    except OSError:
        return False
