"""Something that happens once, and that threads wait for."""

from __future__ import annotations

import contextlib
import threading
from collections import deque


class Latch:
    """Like ``threading.Event``, but set once, and safe from Ctrl-C: a wait that is interrupted, at whatever point, leaves no lock
    taken that others need. Thread-safe."""

    def __init__(self) -> None:
        self._is_set = False
        self._waiting: deque[threading.Lock] = deque()
        """A lock for each that waits, taken by itself: it has it a second time when that was released."""

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        """Let all go on who wait. Idempotent; after one that was interrupted, the next does what it has left."""
        self._is_set = True
        while True:
            try:
                waiting = self._waiting.popleft()
            except IndexError:
                return
            waiting.release()

    def wait(self, timeout: float | None = None) -> bool:
        """Whether it is set, after waiting for that: ``timeout`` seconds, or for as long as it takes."""
        if not self._is_set:
            mine = threading.Lock()
            mine.acquire()
            self._waiting.append(mine)
            if not self._is_set:  # or this one came too late to be let go
                mine.acquire(timeout=-1 if timeout is None else max(timeout, 0.0))
            if not self._is_set:  # whoever polls would leave a lock each time
                with contextlib.suppress(ValueError):
                    self._waiting.remove(mine)
        return self._is_set
