"""Recognise the directories on several drives that belong to one table or one store, and refuse mixtures with copies.

1. Each directory has the identity of its table or store, 32 random hexadecimal digits, and its own number. The first
   directory has the manifest. The path of each directory is recorded, too.
2. A writer chooses a new identity before its first change. So an original and its copy have different identities once
   one of them was changed, and directories of both are refused together.
3. While a new identity is being written to the directories, former identities are valid, too. They are listed until all
   directories have the new one: in the manifest of a table, in the memberships of a store.
4. A copy that was not changed has the identity of its original. A mixture of both is recognised by the recorded
   paths: some directories are at their recorded paths, and another was given although the directory at its recorded
   path is there, too.
5. A directory is identified by its number, not by its path: mount points may have been exchanged.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path


def refuse_mixture(given: Sequence[Path], recorded: Sequence[Path | None], is_at: Callable[[int, Path], bool]) -> None:
    """Raise ValueError if the directories are a mixture of originals and copies.

    That is so if some are at their recorded paths, and another is not, although the directory of its number is still at
    the path recorded for it.

    Args:
        given: The directories, in the order of their numbers.
        recorded: Path of each directory when its identity was written; None if it was not recorded.
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
    """Return whether two paths refer to the same directory. False if one does not exist or cannot be read."""
    try:
        return os.path.samefile(path, other)
    except OSError:
        return False
