"""Transfers that TensorNVMe's methods have started, and that a later call waits for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from deepnvme._interrupts import defer_interrupts
from deepnvme.engine import Future

Callback = Callable[[], object]


@dataclass(eq=False)
class Operation:
    """One transfer, or several with one future."""

    future: Future
    subjects: frozenset[object]
    """Keys and storages that it uses. Operations that share one must not overlap."""
    on_success: Callable[[], None]
    """Called once when the transfer is found to have succeeded, before the callback."""
    on_failure: Callable[[], None]
    """Called once when it is found to have failed, before its error is raised."""
    callback: Callback | None
    """The user's function, called once after a success."""


class Operations:
    """Operations under way, oldest first.

    Each is finished by exactly one call that waits for it, in that call's thread: the call raises the operation's error or calls
    its callback. If the call is interrupted or raises, the operations that it has not reached stay under way, for the next call
    to finish. Not thread-safe.
    """

    def __init__(self) -> None:
        self._under_way: list[Operation] = []

    def __bool__(self) -> bool:
        return bool(self._under_way)

    def start(
        self,
        begin: Callable[[], Future],
        subjects: frozenset[object],
        on_success: Callable[[], None],
        on_failure: Callable[[], None],
        callback: Callback | None,
    ) -> Operation:
        """Start a transfer and record it. Does not block. Ctrl-C is deferred, so that both happen or neither.

        Args:
            begin: Starts the transfer and returns its future.
            subjects, on_success, on_failure, callback: Fields of the operation.

        Raises:
            BaseException: What ``begin`` raises, after ``on_failure`` has been called.
        """
        with defer_interrupts():
            try:
                future = begin()
            except BaseException:
                on_failure()
                raise
            operation = Operation(future, subjects, on_success, on_failure, callback)
            self._under_way.append(operation)
        return operation

    def finish(self, operation: Operation) -> None:
        """Wait for an operation, then call its callback or raise its error. Ctrl-C interrupts only the wait and the callback."""
        error = operation.future.exception()
        with defer_interrupts():
            self._under_way.remove(operation)
            (operation.on_success if error is None else operation.on_failure)()
        if error is not None:
            raise error
        if operation.callback is not None:
            operation.callback()

    def finish_all(self, subjects: frozenset[object] | None = None) -> None:
        """Wait for all operations, or for those that share one of the subjects, oldest first, with those that callbacks start.

        Stops at the first error and raises it; the others stay under way.
        """
        while True:
            chosen = (each for each in self._under_way if subjects is None or not subjects.isdisjoint(each.subjects))
            operation = next(chosen, None)
            if operation is None:
                return
            self.finish(operation)
