"""The background thread of a table: continues prefetches and write-behind between the calls of the table."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

from deepnvme._interrupts import defer_interrupts

if TYPE_CHECKING:
    from deepnvme.memory.lease import Transfer

    from .reading import RowReader
    from .writing import RowWriter

_WAIT_SECONDS = 0.005
"""Seconds that the thread waits for one transfer before it checks the other reads and writes in flight."""


class BackgroundThread:
    """Delivers prefetched rows as they arrive, starts further prefetch reads, and writes changed rows.

    The thread runs only while there is work. It waits for the drive without holding the table's lock. It has references to
    the table's reader and writer, but not to the table. It is a daemon thread: the interpreter does not wait for it at exit.

    Args:
        lock: The table's lock.
        reader: Starts and delivers prefetches.
        writer: Writes changed rows; None for a read-only table.
    """

    def __init__(self, lock: threading.RLock, reader: RowReader, writer: RowWriter | None) -> None:
        self._lock, self._reader, self._writer = lock, reader, writer
        self._thread: threading.Thread | None = None
        self._stopped = False

    def wake(self) -> None:
        """Start the thread if there is something to do. Never blocks. Called with the lock held."""
        if self._stopped or (self._thread is not None and self._thread.is_alive()):
            return
        if not self._reader.prefetching and (self._writer is None or not self._writer.writing_behind):
            return
        with defer_interrupts():
            self._thread = threading.Thread(target=self._run, name="deepnvme table", daemon=True)
            # Without a thread, everything goes on with the next call of the table.
            with contextlib.suppress(RuntimeError):
                self._thread.start()

    def stop(self) -> None:
        """Tell the thread to start nothing more, and to end. Returns at once. Called with the lock held."""
        self._stopped = True

    def _run(self) -> None:
        while True:
            with self._lock:
                future: Transfer | None = None if self._stopped else self._reader.next_prefetched()
                if future is None and self._writer is not None and not self._stopped:
                    future = self._writer.next_written()
                elif self._writer is not None and not self._stopped:
                    self._writer.write_behind()
                if future is None:
                    self._thread = None  # the lock is held: the next wake() starts another thread
                    return
            with contextlib.suppress(TimeoutError):
                future.exception(_WAIT_SECONDS)
            del future
