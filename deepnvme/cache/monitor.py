"""State that the calling thread and a helper thread change one at a time, and never while waiting for a transfer."""

from __future__ import annotations

import concurrent.futures
import contextlib
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator

from deepnvme._interrupts import defer_interrupts
from deepnvme._polling import TRANSFER_POLL_SECONDS
from deepnvme.telemetry.profiler_ranges import profiler_range

Wait = Callable[[float | None], object]
"""Function that waits until a transfer has ended, for at most the given seconds (None: no limit). May raise TimeoutError."""


class Monitor(ABC):
    """Base class whose state changes only with the lock held and signals deferred, and never during a wait for a transfer.

    A method that has to wait is written as a step function: it returns a :data:`Wait`, and :meth:`_until` calls that and repeats
    the step. So Ctrl-C never leaves a change half made: it takes effect during a wait, or after a change.

    Args:
        helper: Name of a thread that continues the work while no caller waits. It runs only while there is something to wait
            for. None: there is no such thread, and callers start further transfers while they wait.
    """

    def __init__(self, helper: str | None) -> None:
        self._lock = threading.Lock()
        self._helper: threading.Thread | None = None
        self._helper_name = helper
        self.seconds_waited = 0.0
        """Total seconds of the timed waits."""
        self.seconds_waited_to_write = 0.0
        """Seconds of the timed waits that were for a write."""

    def helping(self) -> bool:
        """Return whether the current thread is the helper.

        A finalizer may run in the helper at any point, even while the helper holds the lock.
        """
        return self._helper is not None and threading.current_thread() is self._helper

    @abstractmethod
    def _collect_ended(self) -> None:
        """Collect the errors of transfers that are done. Called without the lock: it may verify checksums."""

    @abstractmethod
    def _apply_ended(self) -> None:
        """Set the next state of each block whose transfer has ended, according to the last :meth:`_collect_ended`.

        Called before each call of a step function.
        """

    @abstractmethod
    def _start_transfers(self) -> None:
        """Start the transfers that can be started now. Called after each call of a step function."""

    @abstractmethod
    def _awaited(self) -> Wait | None:
        """Return a function that waits until more transfers can be started; None if no transfer is left to be started."""

    @abstractmethod
    def _blocked_by_other_transfers(self) -> bool:
        """Return whether the end of a transfer that no caller waits for would allow more transfers to be started."""

    @abstractmethod
    def _is_write(self, wait: Wait) -> bool:
        """Return whether ``wait``, which a step function has returned, waits for a write rather than a read."""

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        """Hold the lock and defer signals during the ``with`` body, then start the transfers that can be started."""
        with defer_interrupts(), self._lock:
            yield
            self._start_transfers()

    def _until(self, step: Callable[[], Wait | None], first: Callable[[], None] | None = None, timed: bool = False) -> None:
        """Call ``first`` once, then repeat ``step`` until it returns None, each time after the wait that ``step`` has returned.

        Raises the exceptions of ``first`` and ``step``. With ``timed``, adds the seconds waited to ``seconds_waited``, and
        for writes also to ``seconds_waited_to_write``.
        """
        while True:
            self._collect_ended()
            with defer_interrupts(), self._lock:
                self._apply_ended()
                if first is not None:
                    first()
                    first = None
                wait = step()
                self._start_transfers()
                if wait is None:
                    return
                starved = self._helper_name is None and self._blocked_by_other_transfers()
                to_write = self._is_write(wait)
            begun = time.perf_counter()
            name = "wait_write" if to_write else "wait_read"
            with contextlib.suppress(TimeoutError, concurrent.futures.TimeoutError), profiler_range(name):
                wait(TRANSFER_POLL_SECONDS if starved else None)
            del wait  # a transfer that keeps its error would be kept by that error's traceback
            seconds = time.perf_counter() - begun
            self.seconds_waited += seconds if timed else 0.0
            self.seconds_waited_to_write += seconds if timed and to_write else 0.0

    def _start_helper(self) -> None:
        """Start the helper thread if there is something for it to wait for. Call with the lock held."""
        if self._helper_name is not None and self._helper is None and self._awaited() is not None:
            self._helper = threading.Thread(target=self._help, name=self._helper_name)
            self._helper.start()

    def _help(self) -> None:
        while True:
            self._collect_ended()
            with defer_interrupts(), self._lock:
                self._apply_ended()
                self._start_transfers()
                wait = self._awaited()
                if wait is None:
                    self._helper = None
                    return
            wait(None)
