"""Orders the operations of a store: which may begin, which must wait, and which errors have not been reported yet."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from typing import TypeVar

from .futures import Failure, Operation, check_not_owned

Result = TypeVar("Result")

_SWEPT_FROM = 64
"""Number of operations under way from which those that have ended are settled, although nobody has waited for them."""


class OperationScheduler:
    """Begins a store's operations one at a time, with the store's lock held; several can be under way together. Thread-safe.

    Nothing blocks while the lock is held: neither on the drive, nor on memory, nor on another lock. The lock is only ever taken
    by a ``with`` statement directly, so that Ctrl-C cannot come between taking it and entering the block. In a forked child every
    method raises RuntimeError.
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
        """The store's lock. Public methods of the store take it with ``with``.

        Raises:
            RuntimeError: If this thread holds the lock already: a finalizer or signal handler uses the store in the middle of a
                change. Also in a forked child.
        """
        self._check_process()
        check_not_owned(self._lock)
        return self._lock

    def check_open(self) -> None:
        """Check that the store is open. Call with the lock held.

        Raises:
            ValueError: If it is closed.
        """
        if self._closed:
            raise ValueError("the store is closed")

    def after(self, conflicts: Callable[[], Iterable[Operation]], start: Callable[[], Result]) -> Result:
        """Call ``start`` once there are no conflicts, and return its result. Blocks until then, without holding the lock.

        Args:
            conflicts: Returns the operations that must end first. Called with the lock held.
            start: Called with the lock held, if there are none.
        """
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
        """Return a new operation, to be passed to :meth:`begin`.

        Args:
            finish: Called when all its transfers have ended, with the lock held; again if it was interrupted.
        """

        def end(operation: Operation, failures: list[Failure]) -> None:
            if finish is not None:
                finish(operation, failures)
            if failures and not operation.seen:
                self._failed = [*(other for other in self._failed if not other.seen and other is not operation), operation]
            self.under_way.discard(operation)

        return Operation(self._lock, end)

    def begin(self, operation: Operation) -> None:
        """Record that an operation is under way. Call with the lock held."""
        self.under_way.add(operation)
        if len(self.under_way) > self._swept:  # operations whose futures were dropped would keep their tensors alive
            for other in [other for other in self.under_way if other is not operation and other.ended()]:
                other.settle_ended()
            self._swept = max(_SWEPT_FROM, 2 * len(self.under_way))

    def settle_interrupted(self) -> None:
        """Undo operations that were interrupted while they were being started, if their transfers have ended.

        Never blocks. Call with the lock held.
        """
        for operation in [operation for operation in self.under_way.copy() if not operation.complete]:
            if operation.ended():
                operation.settle_ended()

    def wait_for_all(self) -> None:
        """Wait until all operations that are under way now have ended."""
        with self.lock:
            under_way = list(self.under_way)
        for operation in under_way:
            operation.settle()

    def raise_unseen(self) -> None:
        """Raise the first error that no caller has seen, and forget the others."""
        unseen = [operation.error for operation in self._failed if not operation.seen]
        try:
            if unseen and unseen[0] is not None:
                raise unseen[0]
        finally:
            self._failed = []

    def close(self) -> None:
        """Let no more operations begin."""
        with self.lock:
            self._closed = True

    def _check_process(self) -> None:
        """Raise RuntimeError in a forked child."""
        if os.getpid() != self._process:
            raise RuntimeError("the store is the parent process's: a forked child needs one of its own, in another directory")
