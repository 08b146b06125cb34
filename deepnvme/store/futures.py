"""A store's operations: the transfers of one call as one future, the order in which calls begin, and errors not yet reported."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar

from deepnvme._interrupts import defer_interrupts
from deepnvme.engine import Future
from deepnvme.telemetry.descriptions import representation, size_for_people

Result = TypeVar("Result")
Further = TypeVar("Further")
Failure = tuple[OSError, Sequence[Any]]
"""An error, and the subjects (such as catalog entries) of the transfers that failed with it."""
_SWEPT_FROM = 64
"""Number of operations in progress above which :meth:`OperationScheduler.begin` settles ended operations nobody waits for."""


def check_not_owned(lock: threading.RLock) -> None:
    """Check that this thread does not hold the lock already.

    Raises:
        RuntimeError: If it does, which means that a finalizer or signal handler has interrupted a call of the store.
    """
    if lock._is_owned():  # type: ignore[attr-defined]
        raise RuntimeError(
            "the store is in the midst of another call of this thread: a finalizer or a signal handler may not use it then;"
            " note there what is to be done, and do it later"
        )


class Operation:
    """All transfers of one call of a store, and what to do when they have ended.

    The thread that starts the transfers holds the lock ``starting`` meanwhile, and sets ``complete`` when all are started. If an
    exception (such as Ctrl-C in a wait) stops it before, ``starting`` is free and ``complete`` is False: the operation has then
    failed for all its subjects.

    No background thread is used: ``finish`` is called by the first thread that waits for the operation or looks at its result.

    Args:
        lock: The store's lock, held while ``finish`` is called.
        finish: Called with the operation and its failures when all transfers have ended.
    """

    def __init__(self, lock: threading.RLock, finish: Callable[[Operation, list[Failure]], None]) -> None:
        self.starting = threading.Lock()
        self._starter = threading.get_ident()
        self._lock = lock
        self._finish: Callable[[Operation, list[Failure]], None] | None = finish
        self._transfers: list[tuple[Future, Sequence[Any]]] = []
        self.complete = False
        """Whether all transfers were started."""
        self.subjects: Sequence[Any] = ()
        """Objects that the operation concerns, such as catalog entries.

        If the operation fails other than by a transfer, it fails for all its subjects.
        """
        self._failure: OSError | None = None
        self.error: OSError | None = None
        """The first error, once the operation is settled; None if there is none."""
        self.seen = False
        """Whether the error was raised to a caller."""

    @property
    def settled(self) -> bool:
        """Whether all transfers have ended and ``finish`` was called."""
        return self._finish is None

    def fail(self, error: OSError) -> None:
        """Make the operation fail for all its subjects, even if its transfers succeed."""
        self._failure = error

    def submit(self, start: Callable[..., Future], *arguments: Any, subjects: Sequence[Any]) -> None:
        """Call ``start`` with the arguments, and record the transfers whose future it returns.

        Args:
            start: Starts transfers and returns their future.
            arguments: Arguments of ``start``.
            subjects: The subjects of the transfers, such as catalog entries, which fail with the transfers. If the future's error
                has ``indices``, only the subjects with these indices fail.
        """
        with defer_interrupts():  # a transfer that was started has to be recorded
            self._transfers.append((start(*arguments), subjects))

    def ended(self) -> bool:
        """Return whether all transfers have ended. Never blocks."""
        if self.settled:
            return True
        if not self.complete and self.starting.locked():
            return False
        transfers = list(self._transfers)
        if not all(transfer.done() for transfer, _ in transfers):
            return False
        for transfer, _ in transfers:
            transfer.exception()  # an engine's future drops its tensor when it is asked; leases wait for that
        return True

    def cancel(self) -> bool:
        """Cancel the transfers that have not ended. Return False if all had ended."""
        return sum(transfer.cancel() for transfer, _ in list(self._transfers)) > 0  # each of them, not only the first

    def settle(self, timeout: float | None = None) -> OSError | None:
        """Wait until all transfers have ended, then call ``finish`` unless it was called before.

        Args:
            timeout: Seconds to wait; None waits for as long as it takes.

        Returns:
            The first error, or None.

        Raises:
            TimeoutError: After ``timeout``. The transfers continue.
            RuntimeError: If this thread is in the middle of another call of the store, as in a finalizer or signal handler.
        """
        if not self.settled:
            check_not_owned(self._lock)
            deadline = None if timeout is None else time.monotonic() + timeout
            self._wait_for_start(deadline)
            for transfer, _ in list(self._transfers):
                transfer.exception(None if deadline is None else max(deadline - time.monotonic(), 0.0))
            with defer_interrupts(), self._lock:
                self.settle_ended()
        return self.error

    def settle_ended(self) -> None:
        """Collect the errors of the transfers and call ``finish``, unless that was done before.

        Call with the lock held, after all transfers have ended.
        """
        if self._finish is None:
            return
        if not self.complete:
            self.fail(self._failure or OSError(errno.ECANCELED, "the call has failed"))
            self.seen = True  # the call has raised it
        failures: list[Failure] = [] if self._failure is None else [(self._failure, self.subjects)]
        for transfer, subjects in self._transfers:
            error = transfer.exception()
            if error is not None:
                indices = getattr(error, "indices", None)
                failures.append((error, subjects if indices is None else [subjects[index] for index in indices]))
        self.error = failures[0][0] if failures else None
        self._finish(self, failures)
        self._finish = None
        self._transfers, self.subjects = [], ()  # they keep tensors alive

    def _wait_for_start(self, deadline: float | None) -> None:
        """Wait until the thread that starts the transfers has started all, or has failed."""
        if self.complete or not self.starting.locked():
            return
        if self._starter == threading.get_ident():
            raise RuntimeError("the store is in the midst of a call of this very thread, which this one would wait for")
        if deadline is None:
            with self.starting:  # released at once, also if Ctrl-C comes just then
                return
        if not self.starting.acquire(timeout=max(deadline - time.monotonic(), 0.0)):
            raise TimeoutError("the transfers have not all been started")
        self.starting.release()


class StoreFuture(Generic[Result]):
    """The future result of a store operation. Like :class:`deepnvme.Future`, but the result can be of any type.

    When :meth:`done` is True, the transfers have ended, and the tensors that were put may be changed. :meth:`result` and
    :meth:`exception` also do the remaining work, such as verifying checksums, in the calling thread.

    Args:
        operation: The transfers.
        nbytes: Bytes of the tensors.
        conclude: Returns the result, or raises OSError. Called by the first thread that asks for the result, if all transfers
            have succeeded; called again if Ctrl-C interrupted it.
    """

    def __init__(self, operation: Operation, nbytes: int, conclude: Callable[[], Result]) -> None:
        self._operation = operation
        self.nbytes = nbytes
        """Total bytes of the tensors that are read or written."""
        self._conclude: Callable[[], Result] | None = conclude
        self._lock = threading.RLock()
        self._result: Result | None = None
        self._error: OSError | None = None

    def __repr__(self) -> str:
        return representation(self, lambda: size_for_people(self.nbytes), lambda: "done" if self.done() else "under way")

    def then(self, conclude: Callable[[Result], Further]) -> StoreFuture[Further]:
        """Return a future of ``conclude(result)``.

        ``conclude`` runs in the thread that asks for the result. It may raise OSError.
        """
        return StoreFuture(self._operation, self.nbytes, lambda: conclude(self.result()))

    def done(self) -> bool:
        """Return whether the transfers have ended, well or not. Never blocks. Raises RuntimeError in a forked child."""
        return self._conclude is None or self._operation.ended()

    def cancel(self) -> bool:
        """Cancel the transfers that have not ended. The future then ends with OSError (ECANCELED). Never blocks.

        Best effort, like :meth:`deepnvme.Future.cancel`. A tensor that was being put is treated as after any failed write.

        Returns:
            False if all transfers had ended already.
        """
        return self._operation.cancel()

    def result(self, timeout: float | None = None) -> Result:
        """Wait, and return the result.

        Args:
            timeout: Seconds to wait; None waits for as long as it takes.

        Raises:
            OSError: The error that the operation ended with.
            TimeoutError: After ``timeout``. The operation continues.
        """
        error = self.exception(timeout)
        if error is not None:
            raise error
        return self._result  # type: ignore[return-value]  # None may be a valid Result

    def exception(self, timeout: float | None = None) -> OSError | None:
        """Wait like :meth:`result`, and return the error that the operation ended with, or None."""
        error = self._operation.settle(timeout)
        with self._lock:
            if self._conclude is not None:
                if error is None:
                    try:
                        self._result = self._conclude()
                    except OSError as found:
                        error = found
                self._error = error
                self._conclude = None
            self._operation.seen = True
        return self._error


class OperationScheduler:
    """Begins a store's operations one at a time, with the store's lock held. Thread-safe.

    Several operations can be in progress together. While the lock is held, interrupts are deferred and nothing blocks:
    neither on the drive, nor on memory, nor on another lock. Interrupts are handled during the waits outside the lock. In a
    forked child every method raises RuntimeError.
    """

    def __init__(self) -> None:
        self.process = os.getpid()
        """Number of the process that the store belongs to."""
        self.closed = False
        """Whether the store is closed. May be read without the lock, also in a forked child."""
        self._lock = threading.RLock()
        self.under_way: set[Operation] = set()
        self._swept = _SWEPT_FROM
        self._failed: list[Operation] = []

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the store's lock, with interrupts deferred.

        Raises:
            RuntimeError: If this thread holds the lock already: a finalizer or signal handler uses the store in the middle of a
                change. Also in a forked child.
        """
        if os.getpid() != self.process:
            raise RuntimeError("the store is the parent process's: a forked child needs one of its own, in another directory")
        check_not_owned(self._lock)
        with defer_interrupts(), self._lock:
            yield

    def check_open(self) -> None:
        """Check that the store is open. Call with the lock held.

        Raises:
            ValueError: If it is closed.
        """
        if self.closed:
            raise ValueError("the store is closed")

    def after(self, conflicts: Callable[[], Iterable[Operation]], start: Callable[[], Result]) -> Result:
        """Wait until no conflicting operation is in progress, then return ``start()``. The lock is not held during the wait.

        Args:
            conflicts: Returns the operations that must end first. Called with the lock held.
            start: Called with the lock held, once ``conflicts`` returns no operation.
        """
        while True:
            with self.locked():
                self.check_open()
                before = list(conflicts())
                if not before:
                    return start()
            for operation in before:
                operation.settle()

    def operation(self, finish: Callable[[Operation, list[Failure]], None] = lambda operation, failures: None) -> Operation:
        """Return a new operation, to be passed to :meth:`begin`.

        Args:
            finish: Called when all its transfers have ended, with the lock held.
        """

        def end(operation: Operation, failures: list[Failure]) -> None:
            """Call ``finish``, and keep the operation for :meth:`raise_unseen` if no caller has seen its error."""
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

    def settle_failed(self) -> None:
        """Undo operations whose start failed, if the transfers that they did start have ended.

        Never blocks. Call with the lock held.
        """
        for operation in [each for each in self.under_way.copy() if not each.complete and each.ended()]:
            operation.settle_ended()

    def wait_for_all(self) -> None:
        """Wait until all operations that are under way now have ended."""
        with self.locked():
            under_way = list(self.under_way)
        for operation in under_way:
            operation.settle()

    def raise_unseen(self) -> None:
        """Raise the first error that no caller has seen, and forget the others."""
        unseen = [operation.error for operation in self._failed if operation.error is not None and not operation.seen]
        self._failed = []
        if unseen:
            raise unseen[0]

    def close(self) -> None:
        """Refuse further operations with an error. Does not wait for operations in progress, which continue."""
        with self.locked():
            self.closed = True
