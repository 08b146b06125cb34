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
    """What it uses, such as a key and storages: operations that share one must follow one another."""
    succeeded: Callable[[], None]
    """Called once if it has ended well, before the callback."""
    failed: Callable[[], None]
    """Called once if it has not, before the error is raised."""
    callback: Callback | None
    """The user's, called once if it has ended well."""


class Operations:
    """Operations under way, oldest first.

    Each is finished by one call that waits for it, in that call's thread: its error is raised there and nowhere else, or its
    callback called. If a call is interrupted or raises, those that it has not come to stay, for the next one. Not thread-safe.
    """

    def __init__(self) -> None:
        self._under_way: list[Operation] = []

    def __bool__(self) -> bool:
        return bool(self._under_way)

    def start(
        self,
        begin: Callable[[], Future],
        subjects: frozenset[object],
        succeeded: Callable[[], None],
        failed: Callable[[], None],
        callback: Callback | None,
    ) -> Operation:
        """Start a transfer and note it, both or neither if Ctrl-C comes. Arguments are the fields of the operation.

        Args:
            begin: Starts the transfer. If it raises, ``failed`` is called.
        """
        with defer_interrupts():
            try:
                future = begin()
            except BaseException:
                failed()
                raise
            operation = Operation(future, subjects, succeeded, failed, callback)
            self._under_way.append(operation)
        return operation

    def finish(self, operation: Operation) -> None:
        """Wait for an operation, then call its callback or raise its error. Ctrl-C interrupts the waiting only."""
        error = operation.future.exception()
        with defer_interrupts():
            self._under_way.remove(operation)
            (operation.succeeded if error is None else operation.failed)()
        if error is not None:
            raise error
        if operation.callback is not None:
            operation.callback()

    def finish_all(self, subjects: frozenset[object] | None = None) -> None:
        """Finish the operations that share one of the subjects, oldest first; all for None.

        Those that callbacks start meanwhile are finished, too. The first error is raised at once: call it again for the others.
        """
        while True:
            chosen = (each for each in self._under_way if subjects is None or not subjects.isdisjoint(each.subjects))
            operation = next(chosen, None)
            if operation is None:
                return
            self.finish(operation)
