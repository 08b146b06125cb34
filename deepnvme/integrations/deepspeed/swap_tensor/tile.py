"""The bytes of one tensor of a sub-group: in memory, in a file, or on their way."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deepnvme.memory.pool import Lease


class Tile:
    """``nbytes`` of a file's start, and what :class:`TileCache`, which alone changes it, knows of them.

    ``turn``: when in a step its sub-group comes. ``stored``: whether the file has these bytes, be they outdated.
    """

    __slots__ = ("dirty", "error", "in_use", "lease", "nbytes", "path", "resident", "stored", "turn", "writing")

    def __init__(self, path: str, nbytes: int, turn: int, stored: bool = False) -> None:
        self.path = path
        self.nbytes = nbytes
        self.turn = turn
        self.stored = stored
        self.lease: Lease | None = None
        """The memory, if there is any."""
        self.writing = False
        """Whether what is under way between memory and file, if anything, is a write."""
        self.dirty = False
        """Whether the memory is newer than the file."""
        self.in_use = False
        """Whether tensors of the optimizer are this memory, or it is being filled."""
        self.resident = False
        """Whether it stays in memory between uses."""
        self.error: OSError | None = None
        """What reading it ended with."""

    @property
    def memory(self) -> Lease:
        """RuntimeError if there is none."""
        if self.lease is None:
            raise RuntimeError(f"{self!r} is not in memory: acquire or create it before")
        return self.lease

    def __repr__(self) -> str:
        return f"<Tile {self.path}: {self.nbytes} bytes>"
