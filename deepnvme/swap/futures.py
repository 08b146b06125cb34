"""What a store's operations leave: several transfers as one, and what becomes of them when somebody looks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from deepnvme.engine import Future

Result = TypeVar("Result")
Further = TypeVar("Further")
Failure = tuple[OSError, Sequence[Any]]
"""An error, and whose transfers it has ended."""


class Operation:
    """The transfers of one call, each for some of its tensors, and what has to be done when all have ended.

    ``finish`` is called once, by whoever looks first, with the errors and what each was for; ``lock``, the store's, is held.
    No thread waits behind.
    """

    def __init__(self, lock: threading.RLock, finish: Callable[[Operation, list[Failure]], None]) -> None:
        self._lock = lock
        self._finish: Callable[[Operation, list[Failure]], None] | None = finish
        self._transfers: list[tuple[Future, Sequence[Any]]] = []
        self._failures: list[Failure] = []
        self.settled = False
        self.error: OSError | None = None
        """The first, once settled."""
        self.seen = False
        """Whether the error has been raised to somebody."""

    def add(self, transfer: Future, tensors: Sequence[Any]) -> None:
        """``tensors``: whose bytes it moves."""
        self._transfers.append((transfer, tensors))

    def fail(self, error: OSError, tensors: Sequence[Any]) -> None:
        """Note a transfer that could not even be started."""
        self._failures.append((error, tensors))

    def ended(self) -> bool:
        """Whether all transfers have. Never blocks."""
        if self.settled:
            return True
        transfers = list(self._transfers)
        if not all(transfer.done() for transfer, _ in transfers):
            return False
        for transfer, _ in transfers:
            transfer.exception()  # an engine's future lets go of its tensor when it is asked: leases wait for that
        return True

    def settle(self, timeout: float | None = None) -> OSError | None:
        """Wait until all transfers have ended, finish, and return the first error. TimeoutError after ``timeout`` seconds."""
        if not self.settled:
            deadline = None if timeout is None else time.monotonic() + timeout
            for transfer, _ in list(self._transfers):
                transfer.exception(None if deadline is None else max(deadline - time.monotonic(), 0.0))
            with self._lock:
                if not self.settled:
                    self._end()
        return self.error

    def _end(self) -> None:
        for transfer, tensors in self._transfers:
            error = transfer.exception()
            if error is not None:
                self._failures.append((error, tensors))
        self.error = self._failures[0][0] if self._failures else None
        if self._finish is not None:
            self._finish(self, self._failures)
        self.settled = True
        self._transfers, self._failures, self._finish = [], [], None  # which hold tensors


class StoreFuture(Generic[Result]):
    """What a store has under way: like :class:`deepnvme.Future`, with a result of its own type.

    ``done`` says that the transfers have ended: memory that was put may change then. Looking at ``result`` or ``exception``
    does what is left to do, such as verifying checksums, in the thread that looks.
    """

    def __init__(self, operation: Operation, nbytes: int, conclude: Callable[[], Result]) -> None:
        self._operation = operation
        self._nbytes = nbytes
        self._conclude: Callable[[], Result] | None = conclude
        self._lock = threading.RLock()
        self._result: Result | None = None
        self._error: OSError | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors asked for."""
        return self._nbytes

    def then(self, conclude: Callable[[Result], Further]) -> StoreFuture[Further]:
        """A future of what ``conclude`` makes of the result, in the thread that looks; it may raise OSError."""
        return StoreFuture(self._operation, self._nbytes, lambda: conclude(self.result()))

    def done(self) -> bool:
        """Whether the transfers have ended, well or not. Never blocks. RuntimeError in a forked child."""
        return self._conclude is None or self._operation.ended()

    def result(self, timeout: float | None = None) -> Result:
        """Wait, and return the result. Raises the OSError it ended with, or TimeoutError, after which it is still under way."""
        error = self.exception(timeout)
        if error is not None:
            raise error
        result: Result = self._result  # type: ignore[assignment]  # which may be None by its type
        return result

    def exception(self, timeout: float | None = None) -> OSError | None:
        """Wait like :meth:`result`, and return the error it ended with, or None."""
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
