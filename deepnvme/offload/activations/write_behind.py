"""Choice of the saved bytes that are written to the drive, and when."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from .saved_bytes import SavedBytes

_AHEAD_BYTES = 128 << 20
"""Bytes to write before their memory is needed, at most half of the limit: enough to keep a drive busy meanwhile."""


class WriteBehindPolicy:
    """Chooses which saved bytes to write: the oldest, and only as many as needed to make room.

    A step is expected to save as many bytes as the last two steps, the smaller number if they differ. As many of them as will not
    fit into memory are written from the beginning of the step on. If a step saves more than expected, or is the first, some bytes
    are written before their memory is needed.
    """

    def __init__(self) -> None:
        self._candidates: OrderedDict[SavedBytes, None] = OrderedDict()  # oldest first: in memory only, and may be chosen
        self._candidate_bytes = 0
        self._chosen_bytes = 0  # in this step
        self._last_saved_bytes = (0, 0)  # in the last two steps that saved something

    @property
    def candidate_bytes(self) -> int:
        """Bytes that are in memory only, and were not chosen yet."""
        return self._candidate_bytes

    def begin_step(self, last_saved_bytes: int) -> None:
        """Begin a step, after one that has saved ``last_saved_bytes`` bytes."""
        self._chosen_bytes = 0
        if last_saved_bytes:
            self._last_saved_bytes = (last_saved_bytes, self._last_saved_bytes[0])

    def add(self, saved: SavedBytes) -> None:
        """Add newly saved bytes as the newest candidate."""
        self._candidates[saved] = None
        self._candidate_bytes += saved.nbytes

    def remove(self, saved: SavedBytes) -> None:
        """Remove a candidate. Does nothing if it was chosen already."""
        if saved in self._candidates:
            del self._candidates[saved]
            self._candidate_bytes -= saved.nbytes

    def due(self, nbytes: int, saved_bytes: int, limit: int) -> Iterator[SavedBytes]:
        """Yield the saved bytes to write now, the oldest first. One stays a candidate until the next one is asked for.

        Args:
            nbytes: Bytes that are about to be saved.
            saved_bytes: Bytes that this step has saved so far.
            limit: Most bytes of saved tensors in memory.
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
