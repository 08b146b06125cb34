"""The operations of a store, in their order: who goes on, who waits, and who is told what went wrong."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from .futures import Failure, Operation

Result = TypeVar("Result")

_SWEPT_FROM = 64
"""Operations that nobody has looked at, before those that have ended are let go."""


class Turns:
    """Operations begin one at a time, with the lock held, and are under way together. Thread-safe.

    Nobody waits with the lock held. In a forked child every method raises RuntimeError.
    """

    def __init__(self) -> None:
        self._process = os.getpid()
        self._lock = threading.RLock()
        self._closed = False
        self.under_way: set[Operation] = set()
        self._swept = _SWEPT_FROM
        self._failed: list[Operation] = []

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """With the lock held. Raises ValueError once closed."""
        self._check_process()
        with self._lock:
            if self._closed:
                raise ValueError("the store is closed")
            yield

    def after(self, conflicts: Callable[[], Iterable[Operation]], start: Callable[[], Result]) -> Result:
        """``start()``, with the lock held, once there are no conflicts. Waits without the lock."""
        while True:
            with self.taken():
                before = list(conflicts())
                if not before:
                    return start()
            for operation in before:
                operation.settle()

    def begin(self, finish: Callable[[list[Failure]], None] | None = None) -> Operation:
        """An operation that is under way from here on. With the lock held, as ``finish`` is called in the end."""

        def end(operation: Operation, failures: list[Failure]) -> None:
            self.under_way.discard(operation)
            if failures:
                self._failed = [*(other for other in self._failed if not other.seen), operation]
            if finish is not None:
                finish(failures)

        operation = Operation(self._lock, end)
        self.under_way.add(operation)
        if len(self.under_way) > self._swept:  # futures that were dropped would keep their tensors
            for other in [other for other in self.under_way if other is not operation and other.ended()]:
                other.settle()
            self._swept = max(_SWEPT_FROM, 2 * len(self.under_way))
        return operation

    def wait_for_all(self) -> None:
        """Until what is under way now has ended."""
        self._check_process()
        with self._lock:
            under_way = list(self.under_way)
        for operation in under_way:
            operation.settle()

    def raise_unseen(self) -> None:
        """Raise the first error that nobody was told of, and forget the others."""
        unseen = [operation.error for operation in self._failed if not operation.seen]
        self._failed.clear()
        if unseen and unseen[0] is not None:
            raise unseen[0]

    def close(self) -> None:
        """Nothing begins any more."""
        self._check_process()
        with self._lock:
            self._closed = True

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise RuntimeError("the store is the parent process's: a forked child needs one of its own, in another directory")
