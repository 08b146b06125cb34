"""Predicts which extents are used next from the order of their uses so far. Reads nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


class AccessPredictor:
    """Predicts which extent is used next, from the last two uses.

    The prediction is the extent that followed these two uses the last time. If they never occurred one after the other, it is the
    extent that last followed the second of them. Else it is the next extent in the given order, which is cyclic.

    Two uses distinguish the places in a pass at which a shared module is used. So repeated passes are predicted from the second
    pass on, even if they use some extents several times and others never.
    """

    def __init__(self, first: Sequence[str]) -> None:
        self._given = {key: first[(index + 1) % len(first)] for index, key in enumerate(first)}
        self._start = first[0] if first else None
        self._after_two: dict[tuple[str | None, str], str] = {}
        self._after_one: dict[str, str] = {}
        self._last: tuple[str | None, str | None] = (None, None)

    def note(self, key: str) -> None:
        """Record a use, which follows the use recorded before."""
        before, last = self._last
        if last is not None:
            self._after_two[before, last] = self._after_one[last] = key
        self._last = last, key

    def forget_last(self) -> None:
        """Forget the last two uses, because the pass was broken off: the next recorded use does not count as following them."""
        self._last = (None, None)

    def predict(self) -> Iterator[str]:
        """Yield the predicted uses in order, without end. Yields nothing if the order has no extent."""
        before, last = self._last
        while True:
            following = self._following(before, last)
            if following is None:
                return
            yield following
            before, last = last, following

    def _following(self, before: str | None, last: str | None) -> str | None:
        """Return the extent predicted after the uses ``before`` and ``last``; None if there are no extents."""
        if last is None:
            return self._start
        given = self._given.get(last, self._start)
        return self._after_two.get((before, last), self._after_one.get(last, given))
