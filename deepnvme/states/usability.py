"""Check that an optimizer or a training is still open, and used in the process that made it."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator

from deepnvme.telemetry.descriptions import state_text


class UsabilityGuard:
    """Raises if an optimizer or a training is closed, or used in a forked child.

    Args:
        kind: "optimizer" or "training", for messages.
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._closed: Callable[[], str] | None = None
        self._users: list[None] = []  # one for each method that runs: appending and removing needs no lock
        self._process = os.getpid()

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._closed is not None

    @property
    def in_own_process(self) -> bool:
        """Whether the current process is the one that made the object, and not a forked child of it."""
        return os.getpid() == self._process

    def state(self) -> str:
        """Return the state for ``repr``: "closed", "of process ...", or ""."""
        return state_text(self.closed, self._process)

    def close(self, reason: Callable[[], str] | None = None) -> None:
        """Mark the object as closed: :meth:`check_open` raises from now on. ``reason`` returns its message, if given."""
        if self._closed is None:
            self._closed = (lambda: f"this {self._kind} is closed") if reason is None else reason

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Mark the object as in use during this context, so that :meth:`check_unused` raises."""
        self._users.append(None)
        try:
            yield
        finally:
            self._users.pop()

    def check_unused(self) -> None:
        """Raise RuntimeError while a context of :meth:`in_use` is open, in this thread or another."""
        if self._users:
            raise RuntimeError("a step or another method of it is running")

    def check_process(self) -> None:
        """Raise RuntimeError in a forked child."""
        if not self.in_own_process:
            raise RuntimeError(f"this {self._kind} is the parent process's: a forked child cannot use it")

    def check_open(self) -> None:
        """Raise RuntimeError in a forked child, or after close()."""
        self.check_process()
        if self._closed is not None:
            raise RuntimeError(self._closed())


class OneThread:
    """Lets one thread at a time use a training, with threads that help it."""

    def __init__(self) -> None:
        self._claims: dict[str, threading.Thread] = {}  # "by": the thread that runs a method
        self._helpers: set[threading.Thread] = set()

    @contextlib.contextmanager
    def claimed(self) -> Iterator[None]:
        """Claim the training for the current thread in this context; may be nested. Raises RuntimeError if another has it."""
        first, this = not self._claims, threading.current_thread()
        try:
            self._claims.setdefault("by", this)  # one of two threads that come at the same time gets the other one
            self.check()
            yield
        finally:
            if first and self._claims.get("by") is this:
                self._claims.clear()

    @contextlib.contextmanager
    def helping(self) -> Iterator[None]:
        """Let the current thread use, in this context, the training that another thread has claimed."""
        this = threading.current_thread()
        self._helpers.add(this)
        try:
            yield
        finally:
            self._helpers.discard(this)

    @property
    def is_another(self) -> bool:
        """Whether a thread has claimed the training, and the current thread neither is that thread nor helps it."""
        owner, this = self._claims.get("by"), threading.current_thread()
        return owner is not None and owner is not this and this not in self._helpers

    def check(self) -> None:
        """Raise RuntimeError if a thread has claimed the training, and the current thread neither is it nor helps it."""
        if self.is_another:
            name = self._claims["by"].name if "by" in self._claims else "another thread"
            raise RuntimeError(
                f"this training is used by thread {name!r} now: call its methods, and its model, from one thread at a time"
            )
