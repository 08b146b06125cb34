"""Time spent in ``with`` bodies."""

from __future__ import annotations

import time


class Stopwatch:
    """Adds up the time spent in ``with`` bodies.

    Not a generator-based context manager: Ctrl-C could leave a generator suspended, which would then count the time until it
    is garbage-collected.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._begun = 0.0

    def __enter__(self) -> None:
        self._begun = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds += time.perf_counter() - self._begun
