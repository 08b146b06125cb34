"""The most bytes that were in use at a time."""

from __future__ import annotations


class HighWaterMark:
    """Counts bytes in use, and remembers the most."""

    def __init__(self) -> None:
        self.now = self.most = 0

    def add(self, nbytes: int) -> None:
        """Count ``nbytes`` bytes more in use, or fewer if negative."""
        self.now += nbytes
        self.most = max(self.most, self.now)

    def restart(self) -> int:
        """Return the most bytes so far, and remember the most from now on."""
        most, self.most = self.most, self.now
        return most
