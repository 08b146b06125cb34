"""Which tests may run at the same time. Several processes of pytest-xdist share the machine; a test that uses up what there is
for all, or times itself against the clock, is marked ``alone``.
"""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path

# Files that are there anyway, so that there is nothing to make or to remove.
_DOOR, _ROOM = Path(__file__), Path(__file__).with_name("__init__.py")


@contextlib.contextmanager
def machine(alone: bool) -> Iterator[None]:
    """Whoever is ``alone`` inside is, among the tests of this checkout."""
    with _DOOR.open() as door, _ROOM.open() as room:
        # Whoever waits to be alone holds the door: others could follow one another in for ever.
        fcntl.flock(door, fcntl.LOCK_EX)
        fcntl.flock(room, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(door, fcntl.LOCK_UN)
        try:
            yield
        finally:
            fcntl.flock(room, fcntl.LOCK_UN)  # said, because a process forked meanwhile may have it open still
