"""The bytes of one tensor of a sub-group: in memory, in a file, or on their way."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deepnvme.engine import Future
    from deepnvme.swap.buffers import Lease


class Tile:
    """``nbytes`` of a file's start, and what :class:`TileCache`, which alone changes it, knows of them.

    ``turn``: when in a step its sub-group comes.
    """

    __slots__ = ("dirty", "error", "in_use", "lease", "nbytes", "path", "resident", "stored", "transfer", "turn", "writing")

    def __init__(self, path: str, nbytes: int, turn: int) -> None:
        self.path = path
        self.nbytes = nbytes
        self.turn = turn
        self.lease: Lease | None = None
        """The memory, if there is any."""
        self.transfer: Future | None = None
        """What is under way between memory and file."""
        self.writing = False
        """Whether that is a write."""
        self.dirty = False
        """Whether the memory is newer than the file."""
        self.stored = False
        """Whether the file has these bytes, be they outdated."""
        self.in_use = False
        """Whether tensors of the optimizer are this memory."""
        self.resident = False
        """Whether it stays in memory between uses."""
        self.error: OSError | None = None
        """What reading it ended with."""

    @property
    def idle(self) -> bool:
        """In memory, where nobody needs it right now."""
        return self.lease is not None and self.transfer is None and not self.in_use

    def __repr__(self) -> str:
        return f"<Tile {self.path}: {self.nbytes} bytes>"
