"""In which order a training step uses its blocks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from deepnvme.cache.block import Block


class StepOrder:
    """Predicts which blocks are used next: those that followed in the last step, then those that the next one begins with."""

    def __init__(self) -> None:
        self._last: list[Block] = []
        self._now: list[Block] = []
        self._place = 0  # in the last step, after the use that the newest one corresponds to

    def begin_step(self) -> None:
        """Begin a step, which what is noted from now on belongs to."""
        if self._now:
            self._last = self._now
        self._now, self._place = [], 0

    def note(self, block: Block) -> None:
        """Note a use. One that the last step did not have changes nothing in what is predicted."""
        self._now.append(block)
        for place in range(self._place, len(self._last)):
            if self._last[place] is block:
                self._place = place + 1
                return

    @property
    def newest(self) -> list[Block]:
        """The uses of the newest step, in order; a block may have several."""
        return list(self._now)

    def following(self) -> Iterator[Block]:
        """Yield what is used next, each block once."""
        yield from dict.fromkeys(itertools.chain(self._last[self._place :], self._last[: self._place]))
