"""Prediction of the order in which a backward unpacks the tensors that the forward has saved."""

from __future__ import annotations

from collections.abc import Iterator


class UnpackOrder:
    """Predicts which saved storages a backward unpacks next: those that were unpacked next in the last step.

    In the first step, it predicts the reverse order of saving. Saves are numbered. A step is expected to save the same tensors as
    the last one, so a save is identified by its number counted from the beginning of the step. The reverse order is not exact:
    all tensors of a compiled block are wanted together, in the order of saving.
    """

    def __init__(self) -> None:
        self._first = 0
        self._unpacked: dict[int, None] = {}  # numbers in the step, in the order in which they were first unpacked
        self._last: list[int] = []
        self._places: dict[int, int] = {}

    @property
    def begun(self) -> bool:
        """Whether the backward of this step has unpacked anything."""
        return bool(self._unpacked)

    def begin_step(self, first: int) -> None:
        """Begin a step. Later calls of :meth:`note` belong to it.

        Args:
            first: Number of the step's first save.
        """
        if self._unpacked:
            self._last = list(self._unpacked)
            self._places = {number: place for place, number in enumerate(self._last)}
        self._unpacked = {}
        self._first = first

    def note(self, number: int) -> None:
        """Record that the backward has unpacked save ``number``. Saves of earlier steps are ignored."""
        if number >= self._first:
            self._unpacked.setdefault(number - self._first)

    def after(self, number: int) -> Iterator[int]:
        """Yield the numbers of the saves that are expected after save ``number``. Some may have been dropped."""
        place = self._places.get(number - self._first)
        if place is None:
            yield from range(number - 1, -1, -1)
            return
        for following in range(place + 1, len(self._last)):
            yield self._first + self._last[following]
