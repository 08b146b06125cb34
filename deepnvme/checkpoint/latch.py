"""An event that happens once, and that threads can wait for."""

from __future__ import annotations

import contextlib
import threading
from collections import deque


class Latch:
    """Like ``threading.Event``, but it can only be set once, and it is safe from Ctrl-C.

    A wait that is interrupted at any point leaves no lock taken that other threads need. Thread-safe.
    """

    def __init__(self) -> None:
        self._is_set = False
        self._waiting: deque[threading.Lock] = deque()
        """One lock for each waiting thread, which acquires it twice: the second acquire returns when :meth:`set` releases it."""

    def is_set(self) -> bool:
        """Return whether :meth:`set` was called. Never blocks."""
        return self._is_set

    def set(self) -> None:
        """Wake all waiting threads. Idempotent: if a call was interrupted, the next one wakes the remaining threads."""
        self._is_set = True
        while True:
            try:
                waiting = self._waiting.popleft()
            except IndexError:
                return
            waiting.release()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the latch is set.

        Args:
            timeout: Seconds. None waits without a limit.

        Returns:
            Whether the latch is set. False only after a timeout.
        """
        if not self._is_set:
            mine = threading.Lock()
            mine.acquire()
            self._waiting.append(mine)
            if not self._is_set:  # it may have been set, and the waiting threads woken, before this lock was in the list
                mine.acquire(timeout=-1 if timeout is None else max(timeout, 0.0))
            if not self._is_set:  # timed out: polling would otherwise leave a lock in the list each time
                with contextlib.suppress(ValueError):
                    self._waiting.remove(mine)
        return self._is_set
