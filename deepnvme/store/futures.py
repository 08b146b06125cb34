"""What a store's operations leave: several transfers as one, and what becomes of them when somebody looks."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

from deepnvme.engine import Future

Result = TypeVar("Result")
Further = TypeVar("Further")
Failure = tuple[OSError, Sequence[Any]]
"""An error, and whose transfers it has ended."""
_POLL_SECONDS = 0.001


def check_not_owned(lock: threading.RLock) -> None:
    """Raise RuntimeError if this thread holds the lock already: a finalizer or signal handler has interrupted a call of the
    store."""
    if lock._is_owned():  # type: ignore[attr-defined]
        raise RuntimeError(
            "the store is in the midst of another call of this thread: a finalizer or a signal handler may not use it then;"
            " note there what is to be done, and do it later"
        )


class Operation:
    """The transfers of one call, each for some of its tensors, and what has to be done when all have ended.

    The thread that starts the transfers holds the lock ``starting`` meanwhile, and sets ``complete`` when all are started. If an
    exception (Ctrl-C, say) ends that early, ``starting`` is free and ``complete`` is not set: the operation has failed for all
    its tensors.

    ``finish`` is called by whoever looks first, with the errors and what each was for; ``lock``, the store's, is held. It is
    called again where it was interrupted. No thread waits behind.
    """

    def __init__(self, lock: threading.RLock, finish: Callable[[Operation, list[Failure]], None]) -> None:
        self.starting = threading.Lock()
        self._starter = threading.get_ident()
        self._lock = lock
        self._finish: Callable[[Operation, list[Failure]], None] | None = finish
        self._transfers: list[tuple[Future, Sequence[Any]]] = []
        self.complete = False
        self.reason: OSError | None = None
        """Why it is not complete, if that was an error of the system."""
        self.doubt: OSError | None = None
        """Why it has failed for all its tensors although its transfers may have ended well. Set with the lock held."""
        self.subjects: Sequence[Any] = ()
        """What a failure of everything is to name."""
        self.error: OSError | None = None
        """The first, once settled."""
        self.seen = False
        """Whether the error has been raised to somebody."""

    @property
    def settled(self) -> bool:
        return self._finish is None

    def submit(self, start: Callable[..., Future], *columns: Iterable[Any], subjects: Iterable[Sequence[Any]]) -> list[Future]:
        """Start a transfer from each row of the columns, and return them. ``subjects``: whose bytes each moves.

        Where ``start`` is no Python code, each is noted as soon as it is started: there is no moment for Ctrl-C between the two.
        """
        before = len(self._transfers)
        self._transfers.extend(zip(map(start, *columns), subjects, strict=False))
        return [transfer for transfer, _ in self._transfers[before:]]

    def ended(self) -> bool:
        """Whether all transfers have. Never blocks."""
        if self.settled:
            return True
        if not self.complete and self.starting.locked():
            return False
        transfers = list(self._transfers)
        if not all(transfer.done() for transfer, _ in transfers):
            return False
        for transfer, _ in transfers:
            transfer.exception()  # an engine's future lets go of its tensor when it is asked: leases wait for that
        return True

    def settle(self, timeout: float | None = None) -> OSError | None:
        """Wait until all transfers have ended, finish, and return the first error. TimeoutError after ``timeout`` seconds.

        RuntimeError where this thread is in the midst of another call, as in a finalizer or a signal handler that uses the store.
        """
        if not self.settled:
            check_not_owned(self._lock)
            deadline = None if timeout is None else time.monotonic() + timeout
            self._wait_for_start(deadline)
            for transfer, _ in list(self._transfers):
                transfer.exception(None if deadline is None else max(deadline - time.monotonic(), 0.0))
            with self._lock:
                self.settle_ended()
        return self.error

    def settle_ended(self) -> None:
        """Finish one whose transfers have ended. With the lock held."""
        if not self.settled:
            self._end()

    def _wait_for_start(self, deadline: float | None) -> None:
        while not self.complete and self.starting.locked():
            if self._starter == threading.get_ident():
                raise RuntimeError("the store is in the midst of a call of this very thread, which this one would wait for")
            if deadline is None:
                with self.starting:  # released at once: nobody can be interrupted while holding it for nothing
                    return
            if time.monotonic() > deadline:
                raise TimeoutError("the transfers have not all been started")
            time.sleep(_POLL_SECONDS)

    def _end(self) -> None:
        failures: list[Failure] = []
        if not self.complete:
            failures.append((self.reason or OSError(errno.ECANCELED, "the call was interrupted"), self.subjects))
            self.seen = True  # whoever made the call was told
        if self.doubt is not None:
            failures.append((self.doubt, self.subjects))
        for transfer, tensors in self._transfers:
            error = transfer.exception()
            if error is not None:
                failures.append((error, tensors))
        self.error = failures[0][0] if failures else None
        if self._finish is not None:
            self._finish(self, failures)
        self._finish = None
        self._transfers, self.subjects = [], ()  # which hold tensors


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
