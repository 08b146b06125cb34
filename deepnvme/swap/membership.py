"""Which persisted store several directories are, if any: the first has its manifest, each of the others says whose it is."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .manifest import Manifest, load, membership


def recognise(directories: Sequence[Path]) -> tuple[Manifest | None, list[int]]:
    """The store's manifest and the order of its directories, as indices into those given; None if they hold no store.

    Raises ValueError if they are not the directories of one store, all of them and no other; OSError from reading.
    """
    manifests = {index: manifest for index, directory in enumerate(directories) if (manifest := load(directory)) is not None}
    members = {index: member for index, directory in enumerate(directories) if (member := membership(directory)) is not None}
    if not manifests:
        for index, member in members.items():
            if Path(member.first) not in directories:
                raise ValueError(
                    f"'{directories[index]}' belongs to the store whose manifest is in '{member.first}': give all its directories"
                )
        return None, list(range(len(directories)))  # memberships of a store that never committed mean nothing
    first = next(iter(manifests))
    if len(manifests) > 1:
        listed = ", ".join(f"'{directories[index]}'" for index in manifests)
        raise ValueError(f"{listed} hold a store each: open one at a time")
    manifest = manifests[first]
    if manifest.directories != len(directories):
        raise ValueError(
            f"the store in '{directories[first]}' has {manifest.directories} directories, got {len(directories)}: give all"
        )
    order = [first]
    for wanted in range(1, manifest.directories):
        found = [index for index, member in members.items() if (member.store, member.index) == (manifest.store, wanted)]
        if len(found) != 1:
            raise ValueError(f"directory {wanted} (from 0) of the store in '{directories[first]}' is not among those given")
        order += found
    return manifest, order
