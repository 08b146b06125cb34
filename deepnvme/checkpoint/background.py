"""Saves that go on behind their caller: one after the other, in one thread, which the interpreter's exit waits for."""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from deepnvme._interrupts import defer_interrupts
from deepnvme.memory.pool import BufferPool, buffer_pool

from ._shared_engine import shared_engine
from .destination import Destination
from .formats.archive import archive
from .formats.file_image import FileImage
from .kept_errors import clear_frames, clearing_frames
from .latch import Latch
from .staging import Cancelled, Snapshot


class SaveFuture:
    """A save under way, made by :func:`async_save`; like :class:`deepnvme.Future`.

    A failure that nobody has seen, by ``result`` or ``exception``, is raised by the next save of this process, in place of that,
    and written to stderr at exit. Thread-safe. In a forked child every method raises RuntimeError.
    """

    def __init__(self, destination: Destination, snapshot: Snapshot) -> None:
        self._destination = destination
        self._path = Path(os.path.realpath(destination.path))
        self._snapshot = snapshot
        self._process = os.getpid()
        self._ended = Latch()
        self._error: BaseException | None = None

    @property
    def path(self) -> Path:
        """Of the file, absolute and without symbolic links."""
        return self._path

    @property
    def nbytes(self) -> int:
        """Bytes of the file."""
        return self._snapshot.nbytes

    def wait_staged(self, timeout: float | None = None) -> None:
        """Wait until what is saved may change: it is copied, or the save has failed. Raises TimeoutError after ``timeout`` s."""
        self._wait(self._snapshot.staged, timeout, "staged")

    def done(self) -> bool:
        """Whether the save has ended, well or not. Never blocks."""
        self._check()
        return self._ended.is_set()

    def result(self, timeout: float | None = None) -> int:
        """Wait until the file is there, on stable storage unless without ``fsync``, and return its bytes.

        ``timeout``: seconds; None waits for as long as it takes. Raises what the save ended with, or TimeoutError, after which
        it is still under way. Ctrl-C interrupts the waiting, not the save.
        """
        error = self.exception(timeout)
        if error is not None:
            raise error
        return self.nbytes

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait like :meth:`result`, and return what the save ended with, or None."""
        self._wait(self._ended, timeout, "saved")
        _saves.seen(self)
        return self._error

    def _wait(self, event: Latch, timeout: float | None, what: str) -> None:
        self._check()
        if not event.wait(timeout):
            raise TimeoutError(f"'{self._path}' is not {what} after {timeout} s")

    def _check(self) -> None:
        if os.getpid() != self._process:
            raise RuntimeError(f"the save of '{self._path}' is the parent process's: ask for it there")

    def _run(self) -> None:
        try:
            with self._destination.begin(self.nbytes) as new:
                self._snapshot.write(new.file, shared_engine())
                new.publish()
            self._destination.end()
        except BaseException as error:
            self._error = error
        finally:
            self._snapshot.close()


class _Saves:
    """Those of this process, in the order of their calls: the one that was called last has the last word on a path."""

    # The main thread may be interrupted at any point, and may not leave the lock taken then: it is one that `with` takes and
    # gives back in C, and nobody waits with it held. Condition and Event of threading have such points in their own code.

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._under_way: deque[SaveFuture] = deque()
        self._unseen: deque[SaveFuture] = deque()
        self._thread: threading.Thread | None = None
        """Ends when there is nothing to save. The interpreter waits for it at exit, as it is no daemon."""

    def add(self, save: SaveFuture, max_in_flight: int) -> None:
        """Wait until fewer than so many are under way, and begin."""
        while True:
            with self._lock:
                first = self._under_way[0] if len(self._under_way) >= max_in_flight else None
                if first is None:
                    with defer_interrupts():  # or a thread could be left in the midst of its beginning
                        if self._thread is None:
                            thread = threading.Thread(target=self._work, name="deepnvme-saves")
                            thread.start()  # which waits for the lock
                            self._thread = thread
                        self._under_way.append(save)
                    return
            first._ended.wait()

    def wait_for(self, path: Path) -> None:
        """Until none to this path is under way."""
        while (save := self._first(lambda save: save.path == path)) is not None:
            save._ended.wait()

    def wait_until_gone(self, save: SaveFuture) -> None:
        """Wait until this save has ended, if it is under way."""
        if self._first(lambda other: other is save) is not None:
            save._ended.wait()

    def _first(self, wanted: Callable[[SaveFuture], bool]) -> SaveFuture | None:
        with self._lock:
            first = next(filter(wanted, self._under_way), None)
        return first

    def seen(self, save: SaveFuture) -> None:
        """Note that the caller has been told of this save's error: it is not raised by a later save."""
        with self._lock, contextlib.suppress(ValueError):
            self._unseen.remove(save)

    def unseen(self) -> SaveFuture | None:
        """The first that has failed and not been looked at."""
        with self._lock:
            return self._unseen[0] if self._unseen else None

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._under_way:
                    self._thread = None
                    return
                save = self._under_way[0]
            save._run()
            error = save._error
            if error is not None:
                clear_frames(error)  # they refer to the state, which may go
            with self._lock:
                self._under_way.popleft()
                if error is not None and not isinstance(error, Cancelled):
                    self._unseen.append(save)
            save._ended.set()
            del save, error


_saves = _Saves()


def _report_unseen() -> None:
    """At exit, whose status cannot be changed any more."""
    while (save := _saves.unseen()) is not None:
        _saves.seen(save)
        message = "".join(traceback.format_exception_only(save._error)).strip()
        print(f"deepnvme: '{save.path}' was not saved, and nobody looked at its future: {message}", file=sys.stderr)


def _forget() -> None:
    """In a forked child: they are the parent's."""
    global _saves
    _saves = _Saves()


atexit.register(_report_unseen)
os.register_at_fork(after_in_child=_forget)


def raise_unseen() -> None:
    """The failure of a save that nobody has looked at: what every save begins with."""
    failed = _saves.unseen()
    if failed is not None and failed._error is not None:
        try:
            raise failed._error
        finally:
            _saves.seen(failed)  # now, so that Ctrl-C before leaves it to the next


def wait_for_saves(path: str | os.PathLike[str]) -> None:
    """Those under way to this path, which would replace the file of one that is not in the background."""
    _saves.wait_for(Path(os.path.realpath(path)))


@clearing_frames
def start(
    destination: Destination, image: FileImage, pool: BufferPool | None, lazy: bool, max_in_flight: int
) -> SaveFuture:
    """Stage the image, and write and publish it in the background."""
    if max_in_flight < 1:
        raise ValueError(f"max_in_flight must be at least 1, got {max_in_flight}")
    shared_engine()  # now, if it cannot be made
    snapshot = Snapshot(image, buffer_pool() if pool is None else pool)
    save = SaveFuture(destination, snapshot)
    try:
        snapshot.ensure_memory()
        _saves.add(save, max_in_flight)
        if lazy:
            snapshot.leave()
        else:
            snapshot.stage()
    except BaseException:
        snapshot.cancel()
        _saves.wait_until_gone(save)
        raise
    return save


def refuse_group() -> NoReturn:
    """Its ranks would meet in their threads, beside whatever training has them meet for, in an order of its own on each."""
    raise ValueError(
        "the ranks of a group save together and at once, not behind training: use save(..., group=...), or"
        " torch.distributed.checkpoint.async_save(..., storage_writer=deepnvme.NVMeWriter(path))"
    )


def async_save(
    obj: object,
    path: str | os.PathLike[str],
    *,
    fsync: bool = True,
    checksum: bool = False,
    pickle_module: ModuleType = pickle,
    pickle_protocol: int = 2,
    pool: BufferPool | None = None,
    lazy: bool = False,
    max_in_flight: int = 2,
    group: None = None,
) -> SaveFuture:
    """Save ``obj`` to ``path`` like :func:`save`, in the background. Returns when its bytes are copied, as they are now.

    They are copied into pinned memory leased from ``pool``, by default the process's, and written while the caller goes on.
    **Tensors may change when this returns, if the pool has memory for the whole file, and otherwise after**
    ``future.wait_staged()``: the thread that writes then copies the rest, as memory is given back. ``lazy``: it copies all,
    and this returns at once. CUDA tensors are saved as the current stream, on this thread, leaves them.

    The pool keeps its memory for the next save. Pinning it, 0.3 s for each GB, holds up the first. ``checksum`` is computed here,
    0.4 s for each GB.

    Saves are written one after the other, in the order of their calls. ``max_in_flight``: at most so many are under way; this
    waits for one to end. The interpreter's exit waits for all. Ctrl-C before this returns leaves nothing behind; or, where it
    comes when all is done but to return, the save goes on like any other.

    Raises, before anything is created, what pickling raises; the failure of an earlier save that nobody has looked at;
    OutOfBuffers if the pool's budget is too small, or held by this thread, for which the save would wait. (What this thread
    leases later is to be released before it waits for the future.) All other errors are the future's: see :class:`SaveFuture`.
    ValueError for a ``group``, which only :func:`save` has.
    """
    if group is not None:
        refuse_group()
    raise_unseen()
    image = archive(obj, pickle_module, pickle_protocol, checksum)
    return start(Destination(Path(path).absolute(), fsync), image, pool, lazy, max_in_flight)
