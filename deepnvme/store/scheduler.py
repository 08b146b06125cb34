"""The operations of a store, in their order: who goes on, who waits, and who is told what went wrong."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from typing import TypeVar

from .futures import Failure, Operation, check_not_owned

Result = TypeVar("Result")

_SWEPT_FROM = 64
"""Operations that nobody has looked at, before those that have ended are let go."""


class OperationScheduler:
    """Operations begin one at a time, with the lock held, and are under way together. Thread-safe.

    Nobody waits with the lock held: not for the drive, nor for memory, nor for another lock. It is only ever taken by ``with``
    itself, which Ctrl-C cannot come in between. In a forked child every method raises RuntimeError.
    """

    def __init__(self) -> None:
        self._process = os.getpid()
        self._lock = threading.RLock()
        self._closed = False
        self.under_way: set[Operation] = set()
        self._swept = _SWEPT_FROM
        self._failed: list[Operation] = []

    @property
    def lock(self) -> threading.RLock:
        """To be taken by whoever is called from outside.

        Raises RuntimeError where this thread has it already: a finalizer or a signal handler, that uses the store in the midst of
        a change which is half done.
        """
        self._check_process()
        check_not_owned(self._lock)
        return self._lock

    def check_open(self) -> None:
        """Raises ValueError once closed. With the lock held."""
        if self._closed:
            raise ValueError("the store is closed")

    def after(self, conflicts: Callable[[], Iterable[Operation]], start: Callable[[], Result]) -> Result:
        """``start()``, with the lock held, once there are no conflicts. Waits without the lock."""
        while True:
            with self.lock:
                self.check_open()
                before = list(conflicts())
                if not before:
                    result = start()
            if not before:
                return result
            for operation in before:
                operation.settle()

    def operation(self, finish: Callable[[Operation, list[Failure]], None] | None = None) -> Operation:
        """One that is about to begin. ``finish`` is called in the end, with the lock held; again, where it was interrupted."""

        def end(operation: Operation, failures: list[Failure]) -> None:
            if finish is not None:
                finish(operation, failures)
            if failures and not operation.seen:
                self._failed = [*(other for other in self._failed if not other.seen and other is not operation), operation]
            self.under_way.discard(operation)

        return Operation(self._lock, end)

    def begin(self, operation: Operation) -> None:
        """It is under way from here on. With the lock held."""
        self.under_way.add(operation)
        if len(self.under_way) > self._swept:  # futures that were dropped would keep their tensors
            for other in [other for other in self.under_way if other is not operation and other.ended()]:
                other.settle_ended()
            self._swept = max(_SWEPT_FROM, 2 * len(self.under_way))

    def settle_interrupted(self) -> None:
        """Undo what was interrupted while it was being started, as far as its transfers have ended. Never blocks.

        With the lock held.
        """
        for operation in [operation for operation in self.under_way.copy() if not operation.complete]:
            if operation.ended():
                operation.settle_ended()

    def wait_for_all(self) -> None:
        """Until what is under way now has ended."""
        with self.lock:
            under_way = list(self.under_way)
        for operation in under_way:
            operation.settle()

    def raise_unseen(self) -> None:
        """Raise the first error that nobody was told of, and forget the others."""
        unseen = [operation.error for operation in self._failed if not operation.seen]
        try:
            if unseen and unseen[0] is not None:
                raise unseen[0]
        finally:
            self._failed = []

    def close(self) -> None:
        """Nothing begins any more."""
        with self.lock:
            self._closed = True

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise RuntimeError("the store is the parent process's: a forked child needs one of its own, in another directory")
