"""Predicts which extents are used next from the order of their uses so far. Reads nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


class AccessPredictor:
    """Learns from the sequence of uses so far, and continues it.

    After two in a row comes what came the last time, else what last came after the second of them, else what stands after it in
    the order given first, which begins anew at its end. Two suffice to tell the places of something that is used several times
    in a pass, a shared module say; so passes that are repeated, with parts that are used more often than others or not at all,
    are predicted from the second on.
    """

    def __init__(self, first: Sequence[str]) -> None:
        self._given = {key: first[(index + 1) % len(first)] for index, key in enumerate(first)}
        self._start = first[0] if first else None
        self._after_two: dict[tuple[str | None, str], str] = {}
        self._after_one: dict[str, str] = {}
        self._last: tuple[str | None, str | None] = (None, None)

    def note(self, key: str) -> None:
        """Record a use, the next one after the use recorded before."""
        before, last = self._last
        if last is not None:
            self._after_two[before, last] = self._after_one[last] = key
        self._last = last, key

    def forget_last(self) -> None:
        """Forget the last use, because the sequence was broken off: what is noted next does not follow from it."""
        self._last = (None, None)

    def predict(self) -> Iterator[str]:
        """Yield what will be used next, in order, without end; nothing if nothing is known."""
        before, last = self._last
        while True:
            following = self._following(before, last)
            if following is None:
                return
            yield following
            before, last = last, following

    def _following(self, before: str | None, last: str | None) -> str | None:
        """Return what is used after ``before`` and then ``last``; None if nothing is known."""
        if last is None:
            return self._start
        given = self._given.get(last, self._start)
        return self._after_two.get((before, last), self._after_one.get(last, given))
