"""State that its caller and a helper thread change by turns, waiting for things in between."""

from __future__ import annotations

import contextlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator

from deepnvme._interrupts import defer_interrupts

Wait = Callable[[], object]
"""Returns when something has ended. Called where waiting is allowed."""


class TakingTurns(ABC):
    """Everything changes in :meth:`_changing`, with the lock held and Ctrl-C held back, and nobody waits there: :meth:`_until`
    comes back for each step of what takes several. So a Ctrl-C can only end a wait.

    ``helper``: the name of its thread, which runs only while there is something awaited.
    """

    def __init__(self, helper: str) -> None:
        self._lock = threading.Lock()
        self._helper: threading.Thread | None = None
        self._helper_name = helper

    def helping(self) -> bool:
        """Whether this is the helper's thread, which may hold the lock: a finalizer may run in the midst of anything."""
        return threading.current_thread() is self._helper

    @abstractmethod
    def _take_note(self) -> None:
        """Of what has ended: each step begins with it."""

    @abstractmethod
    def _go_on(self) -> None:
        """Start what can be: each step ends with it."""

    @abstractmethod
    def _awaited(self) -> Wait | None:
        """What the end of lets the helper go on."""

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        with defer_interrupts(), self._lock:
            yield

    def _until(self, step: Callable[[], Wait | None]) -> None:
        """Repeat ``step`` until it returns None, waiting in between for what it returns. What it raises is raised."""
        while True:
            with self._changing():
                self._take_note()
                wait = step()
                self._go_on()
            if wait is None:
                return
            wait()

    def _have_helped(self) -> None:
        """Start the helper if there is something for it to do. To be called while changing."""
        if self._helper is None and self._awaited() is not None:
            self._helper = threading.Thread(target=self._help, name=self._helper_name)
            self._helper.start()

    def _help(self) -> None:
        while True:
            with self._changing():
                self._take_note()
                self._go_on()
                wait = self._awaited()
                if wait is None:
                    self._helper = None
                    return
            wait()
