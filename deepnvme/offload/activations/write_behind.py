"""Which of the saved bytes are written to the drive, and when."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from .saved_bytes import SavedBytes

_AHEAD_BYTES = 128 << 20
"""Bytes that are written before their memory is needed, at most half of the limit: enough to keep a drive busy meanwhile."""


class WriteBehindPolicy:
    """Chooses the oldest, and no more than have to make room.

    A step is expected to save as much as the last two. So what it will have no room for is written from its beginning on, and no
    more than that. If it saves more, or is the first, some is written ahead of the need.
    """

    def __init__(self) -> None:
        self._candidates: OrderedDict[SavedBytes, None] = OrderedDict()  # oldest first: in memory only, and may be chosen
        self._candidate_bytes = 0
        self._chosen_bytes = 0  # in this step
        self._last_saved_bytes = (0, 0)  # in the last two steps that saved something

    @property
    def candidate_bytes(self) -> int:
        """Bytes that are in memory only, and may be chosen."""
        return self._candidate_bytes

    def begin_step(self, last_saved_bytes: int) -> None:
        """Begin a step, given how many bytes the last one has saved."""
        self._chosen_bytes = 0
        if last_saved_bytes:
            self._last_saved_bytes = (last_saved_bytes, self._last_saved_bytes[0])

    def add(self, saved: SavedBytes) -> None:
        """Add the bytes that were saved last."""
        self._candidates[saved] = None
        self._candidate_bytes += saved.nbytes

    def remove(self, saved: SavedBytes) -> None:
        """Do not choose these bytes any more. Does nothing if they were chosen."""
        if saved in self._candidates:
            del self._candidates[saved]
            self._candidate_bytes -= saved.nbytes

    def due(self, nbytes: int, saved_bytes: int, limit: int) -> Iterator[SavedBytes]:
        """Yield what is to be written now, the oldest first. It is a candidate until the next one is asked for.

        Args:
            nbytes: Bytes that are about to be saved.
            saved_bytes: Bytes that were saved in this step.
            limit: Bytes that all may have in memory.
        """
        expected = min(self._last_saved_bytes)  # sizes may alternate
        certain = expected - limit
        if saved_bytes + nbytes > expected:
            limit -= min(limit // 2, _AHEAD_BYTES)
        while self._candidates and (self._candidate_bytes + nbytes > limit or self._chosen_bytes < certain):
            oldest = next(iter(self._candidates))
            yield oldest
            self.remove(oldest)
            self._chosen_bytes += oldest.nbytes
