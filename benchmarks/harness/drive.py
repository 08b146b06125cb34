"""The drive between two measurements: every contender finds the same files, none of them cached, and a quiet device.

Nothing here is ever timed, and nothing here differs from one contender to the next.
"""

from __future__ import annotations

import os
from pathlib import Path

from deepnvme.tools.tune.folder import NotMeasurable, check_space, folder_facts
from harness import pattern


def check(directory: Path, nbytes: int) -> None:
    """Raise NotMeasurable unless ``directory`` lies on a drive, takes O_DIRECT and has ``nbytes`` free."""
    facts = folder_facts(directory)
    if not facts.direct:
        raise NotMeasurable(f"'{directory}' is {facts.label}; give --dir on a drive with O_DIRECT")
    # A nearly full file system allocates in fragments, which no contender is to blame for.
    check_space([(directory, nbytes + nbytes // 10)], "give another --dir or a smaller --size")


def lay_out(path: Path, nbytes: int, seed: int, start: int = 0) -> None:
    """Write the file through, so that its blocks are allocated and initialised: overwriting it converts no extent."""
    with path.open("wb", buffering=0) as file:
        os.posix_fallocate(file.fileno(), 0, nbytes)
        for _, chunk in pattern.chunks(seed, start, nbytes):
            file.write(chunk)
        os.fsync(file.fileno())


def holds(path: Path, nbytes: int, seed: int, start: int = 0) -> bool:
    """Whether the file is exactly ``nbytes`` long and reads as the pattern ``seed``."""
    if path.stat().st_size != nbytes:
        return False
    with path.open("rb", buffering=0) as file:
        return all(file.read(len(chunk)) == chunk for _, chunk in pattern.chunks(seed, start, nbytes))


def preallocate(path: Path, nbytes: int) -> None:
    """Make a file anew whose blocks are reserved, but not written."""
    path.unlink(missing_ok=True)
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, nbytes)
