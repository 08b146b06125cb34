"""Save in the background: one thread writes the queued saves one after the other, and interpreter exit waits for it.

Invariants of the queue of saves, which all threads of the process share:

1. Saves are written in the order in which they were queued. A save leaves the queue when it has ended.
2. While the queue has saves, the saving thread runs. The thread ends only when it finds the queue empty. The queue
   and the reference to the thread change together, under the lock.
3. The error of a failed save is "unseen" until it has been reported once: by ``result`` or ``exception``, by a later
   save, or on stderr at interpreter exit, which then is with status 1 rather than 0.
4. A forked child starts with an empty queue and no thread.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import multiprocessing.util
import os
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from deepnvme._former_names import former_names
from deepnvme._interrupts import defer_interrupts
from deepnvme.engine import Engine
from deepnvme.memory.pool import BufferPool, buffer_pool
from deepnvme.ops import load_async_io
from deepnvme.telemetry.descriptions import printable, representation
from deepnvme.telemetry.profiler_ranges import profiler_range

from .formats.file_image import FileImage
from .formats.pt_image import pt_image
from .publication import Destination
from .snapshot import Cancelled, Snapshot

if TYPE_CHECKING:
    from deepnvme.drives.aio_config import AioConfig

_IN_FLIGHT = 2
"""Most saves that are queued or running: one is written while the next is copied."""


class SaveFuture:
    """A save in progress, returned by :func:`async_save`. Its methods are like those of :class:`deepnvme.Future`.

    An error that was not retrieved with ``result`` or ``exception`` is raised by this process's next save of a .pt or
    safetensors file, which then does not run. If there is no such save, the error is printed to stderr at exit, and the process
    ends with status 1 if its status would be 0. Thread-safe. In a forked child every method raises RuntimeError.
    """

    def __init__(self, destination: Destination, snapshot: Snapshot, engine: Engine) -> None:
        self._destination = destination
        self._path = Path(os.path.realpath(destination.path))
        self._snapshot = snapshot
        self._engine: Engine | None = engine  # until the save has ended: a future may be kept for long
        self._process = os.getpid()
        self._ended = threading.Event()
        self._error: BaseException | None = None

    @property
    def path(self) -> Path:
        """Path of the file: absolute, with symbolic links resolved."""
        return self._path

    @property
    def nbytes(self) -> int:
        """Size of the file in bytes."""
        return self._snapshot.nbytes

    def __repr__(self) -> str:
        return representation(
            self,
            lambda: f"'{printable(self._path)}'",
            lambda: "of the parent process" if os.getpid() != self._process else "",
            lambda: ("failed" if self._error else "done") if self.done() else "under way",
        )

    def done(self) -> bool:
        """Return whether the save has ended, successfully or not. Never blocks."""
        self._check()
        return self._ended.is_set()

    def result(self, timeout: float | None = None) -> int:
        """Wait until the file is published and return its size in bytes.

        The file is then on stable storage, unless the save was started with ``fsync=False``. Ctrl-C interrupts the wait, not
        the save.

        Args:
            timeout: Seconds. None waits without a limit.

        Raises:
            TimeoutError: If the save has not ended after ``timeout`` seconds. It continues.
            Exception: The error that the save failed with.
        """
        error = self.exception(timeout)
        if error is not None:
            raise error
        return self.nbytes

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait like :meth:`result` and return the error that the save failed with, or None if it succeeded.

        Raises:
            TimeoutError: If the save has not ended after ``timeout`` seconds. It continues.
        """
        self._check()
        if not self._ended.wait(timeout):
            raise TimeoutError(f"'{self._path}' is not saved after {timeout} s")
        _saves.seen(self)
        return self._error

    def _check(self) -> None:
        """Raise RuntimeError in a forked child, where the save never ends."""
        if os.getpid() != self._process:
            raise RuntimeError(f"the save of '{self._path}' is the parent process's: ask for it there")

    def _run(self) -> None:
        """Write and publish the file, keeping the error for :meth:`exception`. Called by the saving thread."""
        engine, self._engine = self._engine, None
        assert engine is not None  # a save runs once
        try:
            self._destination.publish(engine, self.nbytes, lambda file: self._snapshot.write(file, engine))
        except BaseException as error:
            self._error = error
        finally:
            self._snapshot.close()


class _Saves:
    """The background saves of this process, written in the order of their calls: the last call for a path wins."""

    def __init__(self) -> None:
        self.staging = threading.RLock()
        """Held while a save is queued and copied, so that saves lease memory in the order in which they are written."""
        self._lock = threading.Lock()
        self._under_way: deque[SaveFuture] = deque()
        self._unseen: deque[SaveFuture] = deque()
        self._thread: threading.Thread | None = None
        """The saving thread; None while the queue is empty. Interpreter exit waits for it: it is not a daemon thread."""
        self._at_childs_end: multiprocessing.util.Finalize | None = None

    def add(self, save: SaveFuture) -> bool:
        """Queue a save, starting the thread if needed. Return False, without queueing it, if the queue is full."""
        if self._at_childs_end is None and multiprocessing.parent_process() is not None:
            self._at_childs_end = multiprocessing.util.Finalize(None, _end_child, exitpriority=0)
        with self._lock:
            if len(self._under_way) >= _IN_FLIGHT:
                return False
            with defer_interrupts():  # Ctrl-C must not leave a half-started thread
                if self._thread is None:
                    thread = threading.Thread(target=self._work, name="deepnvme-saves")
                    thread.start()  # its first step is to acquire the lock
                    self._thread = thread
                self._under_way.append(save)
            return True

    def wait_for_room(self) -> None:
        """Wait until one more save may be queued."""
        while True:
            with self._lock:
                if len(self._under_way) < _IN_FLIGHT:
                    return
                first = self._under_way[0]
            first._ended.wait()

    def wait_for(self, wanted: Callable[[SaveFuture], bool]) -> None:
        """Block until none of the saves for which ``wanted`` returns True is queued or running."""
        while True:
            with self._lock:
                first = next(filter(wanted, self._under_way), None)
            if first is None:
                return
            first._ended.wait()

    def seen(self, save: SaveFuture) -> None:
        """Remove a failed save from those whose error was not reported yet, so that no later save raises its error."""
        with self._lock, contextlib.suppress(ValueError):
            self._unseen.remove(save)

    def unseen(self) -> SaveFuture | None:
        """Return the first failed save whose error was not reported yet, or None."""
        with self._lock:
            return self._unseen[0] if self._unseen else None

    def _work(self) -> None:
        """Run the queued saves one after the other until none is left. The saving thread's target."""
        while True:
            with self._lock:
                if not self._under_way:
                    self._thread = None
                    return
                save = self._under_way[0]
            save._run()
            error = save._error
            kept = error
            while kept is not None:  # its frames would keep the saved tensors alive
                traceback.clear_frames(kept.__traceback__)
                kept = kept.__context__
            with self._lock:
                self._under_way.popleft()
                if error is not None and not isinstance(error, Cancelled):
                    self._unseen.append(save)
            save._ended.set()
            del save, error


_saves = _Saves()


def _report_unseen() -> bool:
    """Print the errors of failed saves that nobody asked for, at exit, and make the exit a failure. Return whether any failed."""
    found = False
    while (save := _saves.unseen()) is not None:
        _saves.seen(save)
        load_async_io().fail_at_exit()  # first: printing may fail
        message = "".join(traceback.format_exception_only(save._error)).strip()
        print(f"deepnvme: '{printable(save.path)}' was not saved, and nobody called result(): {message}", file=sys.stderr)
        found = True
    return found


def _end_child() -> None:
    """Wait for the saves of a child of multiprocessing, which has no other exit handlers, and report the unseen failures."""
    _saves.wait_for(lambda save: True)
    if _report_unseen():
        raise SystemExit(1)


def _forget() -> None:
    """Give a forked child an empty queue of saves: the saves in progress belong to the parent."""
    global _saves
    _saves = _Saves()


atexit.register(_report_unseen)
os.register_at_fork(after_in_child=_forget)


def raise_unseen() -> None:
    """Raise the error of the first failed background save that was not reported yet. Every save calls this first."""
    failed = _saves.unseen()
    if failed is not None and failed._error is not None:
        try:
            raise failed._error
        finally:
            _saves.seen(failed)


def wait_for_saves(path: str | os.PathLike[str]) -> None:
    """Block until no background save to this path, or to a file below it, is queued or running.

    A blocking save calls this first: a background save that ended later would replace the newer file.
    """
    target = Path(os.path.realpath(path))
    _saves.wait_for(lambda save: target == save.path or target in save.path.parents)


def start(destination: Destination, make: Callable[[None], FileImage], pool: BufferPool | None = None) -> SaveFuture:
    """Copy a file image into pinned memory, then write and publish it in the background. Waits while two saves are under way.

    Args:
        destination: Where the file is published.
        make: Returns the image.
        pool: Pool of the pinned memory that the image is copied into. None is the process's pool.

    Returns:
        The future of the save. The image is copied, and its tensors may change.

    Raises:
        Exception: The error of an earlier background save that was not reported yet, or whatever ``make`` raises.
        OutOfBuffers: If the pool's budget is too small, or this thread holds the leases that the save would wait for.
    """
    raise_unseen()
    image = make(None)
    engine = destination.engine()  # here, so that the caller gets the error if the engine cannot be created
    snapshot = Snapshot(image, buffer_pool() if pool is None else pool)
    save = SaveFuture(destination, snapshot, engine)
    snapshot.ensure_memory()
    queued = False
    try:
        while not queued:
            _saves.wait_for_room()
            with _saves.staging:
                queued = _saves.add(save)
                if queued:
                    with profiler_range("stage"):
                        snapshot.stage()
    except BaseException:
        snapshot.cancel()
        _saves.wait_for(lambda other: other is save)
        raise
    return save


@former_names(config="aio_config")
def async_save(
    obj: object,
    path: str | os.PathLike[str],
    *,
    fsync: bool = True,
    checksum: bool | None = None,
    pool: BufferPool | None = None,
    aio_config: AioConfig | None = None,
) -> SaveFuture:
    """Save ``obj`` to ``path`` like :func:`save`, but in the background, with the values that ``obj`` has at the call.

    The bytes are copied into pinned memory leased from ``pool`` and written while the caller continues. When this returns,
    all tensors are copied, and may be changed. If the pool has less memory than the file has bytes, this waits for the first
    chunks to be written. CUDA tensors are saved as the current stream of this thread leaves them.

    The pool keeps its memory for the next save. The first save also has to pin it, which takes 0.3 s per GB.

    Saves are written one after the other, in the order of their calls. While two are under way, this waits. Interpreter exit
    waits for all of them. Ctrl-C before this returns leaves nothing behind, except when it comes after all work is done: then
    the save continues like any other.

    Args:
        obj: Any object that pickles.
        path: Path of the file. A relative path is resolved now.
        fsync: As for :func:`save`.
        checksum: As for :func:`save`. The background thread computes the checksums of tensors on the CPU. With True,
            the checksums of tensors on devices are computed before this returns.
        pool: Pool of the pinned memory. None is the process's pool.
        aio_config: Settings of the engine; None for the profile of the drive, see :func:`deepnvme.engine_for`.

    Returns:
        The future of the save. Errors not listed below are raised by its ``result``.

    Raises:
        Exception: Whatever pickling raises, before anything is created; or the error of an earlier background save that
            was not reported yet.
        OutOfBuffers: If the pool's budget is too small, or is held by this thread, or stays in use for 30 seconds.
        TypeError: If ``aio_config`` is not an AioConfig.
    """
    destination = Destination(Path(path).absolute(), fsync, aio_config=aio_config)
    make = partial(pt_image, obj, 2, checksum)
    return start(destination, make, pool)
