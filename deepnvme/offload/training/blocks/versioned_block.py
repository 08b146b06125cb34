"""A block that steps write to another place each, so that they can be undone."""

from __future__ import annotations

from deepnvme.states.counted_io import StoredBlock
from deepnvme.states.versions import block_name


class VersionedBlock(StoredBlock):
    """A block of which a step writes another version than that of the last completed step.

    Args:
        index: Identifies its versions.
        content_bytes: Bytes of each.
    """

    __slots__ = ("_committed", "changes", "current", "index")

    def __init__(self, index: str, content_bytes: int) -> None:
        self.index = index
        """Identifies its versions."""
        self.current = self._committed = 0
        """Number of the newest version."""
        self.changes = 0
        """How often steps have changed the block, or were undone."""
        super().__init__(block_name(self), content_bytes)
        self.stored = False

    @property
    def uncommitted(self) -> bool:
        """Whether the newest version is not that of the last completed step."""
        return self.current != self._committed

    def changed(self, number: int) -> None:
        """Set the number of the version that the next write, or read, of the block goes to."""
        self.changes += 1
        self.current = number
        self.rename(block_name(self))

    def commit(self) -> None:
        """Take the newest version for the last completed step's."""
        self._committed = self.current

    def undo(self) -> None:
        """Have the next read be of the last completed step's version."""
        self.changed(self._committed)
