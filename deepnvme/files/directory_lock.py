"""A lock that gives a directory one owner at a time.

The kernel releases the lock when the process that holds it dies, and the lock file names that process. Within a
process, each lock belongs to one of the user's objects. Before a lock is refused because of an object of the same
process, garbage is collected, which may free that object. If the object still exists, is of the same class as the
new owner, and its class allows it (``OffloadedOptimizer``), it is closed for the new owner. Any other object keeps
the directory, and the error names it.

1. A process owns a directory while it has an exclusive flock of the lock file, and the path still refers to that file.
2. The lock file is unlinked only while it is locked. Whoever locks it afterwards finds that the path refers to
   another file.
3. A forked child closes its copy of the file, so that the lock ends with the parent.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import io
import os
import shlex
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from deepnvme._polling import PROCESS_POLL_SECONDS
from deepnvme.files.replacing import with_filename
from deepnvme.telemetry.callers import caller

LOCK_NAME = "deepnvme-store.lock"
_NAMED_WITHIN = 1.0  # seconds: a new owner writes its name right after it has the lock


class StoreLocked(OSError):
    """The directory is in use (EBUSY): it has an owner, or it has readers when an owner wants it. Names the holder."""

    holder = "an unknown process"
    """A description of the owner, if it is known."""


CloseForSuccessor = Callable[["DirectoryOwner", Path], None]
"""Function that closes an object so that a new owner can have its directory.

Called with the new owner and the directory. Raises RuntimeError or OSError if the object cannot be closed now.
"""


@dataclass(frozen=True, eq=False)
class DirectoryOwner:
    """Describes the object of this process that holds a directory's lock. Errors name the object."""

    kind: str
    """Name of the object's class, as the user knows it."""
    remedy: str = "call its close()"
    """What the user can do to free the directory, for error messages."""
    close_for_successor: weakref.WeakMethod[CloseForSuccessor] | None = None
    """Method that closes the object when another of its kind is made on the directory.

    It is called only if the same thread makes the other object, or the thread of this one has ended. None if the object is never
    closed for another.
    """
    made_at: str = field(default_factory=caller)
    """File and line of the user's program where the object was made."""
    thread: threading.Thread = field(default_factory=threading.current_thread)
    """The thread that made the object."""
    failures: list[str] = field(default_factory=list)
    """Error of the object's constructor, if it failed. Another object may have been closed for this one before."""

    def __str__(self) -> str:
        return f"the {self.kind} of this process ({os.getpid()}) that was made at {self.made_at}"

    @property
    def of_other_thread(self) -> bool:
        """Whether the object was made by another thread that is still running."""
        return self.thread is not threading.current_thread() and self.thread.is_alive()


class DirectoryLock:
    """The lock of a directory, held from construction to :meth:`release`. The directory is created if it is missing.

    A child process that is forked while the lock is held does not hold it.

    If another object of this process holds the lock, garbage is collected first. If that does not free the lock, the object is
    closed, provided that it is of the new owner's kind and allows that.

    Args:
        directory: The directory.
        owner: The object that the directory is locked for, as errors name it; None to name this lock itself.
        collect: Whether to collect garbage.

    Raises:
        StoreLocked: If another owner, in this process or any other, has the directory.
        OSError: If the directory or the lock cannot be created.
    """

    _file: io.FileIO | None = None  # closes itself, so that no lock outlives this object

    def __init__(self, directory: Path, owner: DirectoryOwner | None = None, *, collect: bool = True) -> None:
        self.directory = directory
        self._owner = DirectoryOwner("DirectoryLock", "call its release()") if owner is None else owner
        self._collect = collect
        self._asked: DirectoryOwner | None = None  # to close
        self._pid = os.getpid()
        self._made: list[Path] = []  # outermost first
        self._locked = False
        try:
            while not self._locked:
                self._made += reversed([path for path in (directory, *directory.parents) if not path.exists()])  # before mkdir
                directory.mkdir(parents=True, exist_ok=True)
                with contextlib.suppress(FileNotFoundError):  # the last owner had created the directory, and has removed it since
                    self._take()
        except BaseException:
            if self._made and not self._locked:  # an interruption may have left a lock file in a directory to be removed
                with contextlib.suppress(OSError):
                    self.release()
                    self._take()
            self.release()
            self._remove_made()
            raise

    def __enter__(self) -> DirectoryLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _take(self) -> None:
        """Take the lock, and write the owner into the lock file. Raises StoreLocked if another owner keeps it."""
        path = self.directory / LOCK_NAME
        while not self._locked:
            with with_filename(path):
                self._file = io.FileIO(str(path), "a+")
            close_in_children(self._file)
            descriptor = self._file.fileno()
            try:
                lock_for(self._owner, self._file, fcntl.LOCK_EX, path, collect=self._collect)
            except BlockingIOError:
                self._close_holder(self._file)
                with with_filename(path):
                    self._file.close()
                continue
            self._locked = refers_to(path, descriptor)
            if not self._locked:
                with with_filename(path):
                    self._file.close()  # the previous owner has just removed this lock file: try again
        since, command = time.strftime("%Y-%m-%d %H:%M:%S"), shlex.join(getattr(sys, "orig_argv", sys.argv))[:1000]
        named = f"the {self._owner.kind} of process {os.getpid()} on {socket.gethostname()} since {since} ({command})"
        with with_filename(path):
            os.ftruncate(descriptor, 0)
            with contextlib.suppress(OSError):  # on a full disk the lock still works, only the owner's name is missing
                os.pwrite(descriptor, named.encode(errors="surrogateescape"), 0)

    def _close_holder(self, file: io.FileIO) -> None:
        """Close the object of this process that holds the file's lock. Raises StoreLocked if that is not possible."""
        holder = next(iter(owners_of(file)), None)
        if holder is not None and holder is self._asked:
            raise locked_error(self.directory, holder) from None
        close = _closer_for(holder, self._owner, self.directory)
        self._asked = holder
        try:
            close(self._owner, self.directory)
        except (RuntimeError, OSError) as failed:
            error = locked_error(self.directory, holder)
            error.strerror = f"{error.strerror}; it cannot be closed for this one: {failed}"
            raise error from failed

    def intact(self) -> bool:
        """Return whether the lock is held, and neither the directory nor the lock file was removed or replaced.

        Raises:
            OSError: If the system cannot tell.
        """
        if not self._locked or self._file is None or self._file.closed or os.getpid() != self._pid:
            return False
        return refers_to(self.directory / LOCK_NAME, self._file.fileno())

    def check(self) -> None:
        """Raise an error unless the lock is intact; see :meth:`intact`.

        Raises:
            FileNotFoundError: If the lock is not intact.
            OSError: If the system cannot tell.
        """
        if not self.intact():
            raise FileNotFoundError(
                errno.ENOENT, "the directory, or the lock in it, was removed while in use", str(self.directory)
            )

    def release(self) -> None:
        """Release the lock and remove its file, and the directory if this lock created it and it is empty.

        Idempotent. Does nothing in a forked child.
        """
        if self._file is None or self._file.closed or os.getpid() != self._pid:
            return
        if self._locked:
            # Unlinked while the lock is still held, so that whoever locks the old file next sees that it is no longer in use.
            with contextlib.suppress(OSError):
                if self.intact():
                    os.unlink(self.directory / LOCK_NAME)
            self._remove_made()
        unlock_and_close(self._file, self.directory / LOCK_NAME)

    def __del__(self, interpreter_ends: Callable[[], bool] = sys.is_finalizing) -> None:
        if not interpreter_ends():  # then modules are gone, and the system ends the lock
            with contextlib.suppress(OSError):
                self.release()

    def _remove_made(self) -> None:
        """Remove the directories that this lock created, if they are empty."""
        for directory in reversed(self._made):
            with contextlib.suppress(OSError):  # not empty: another process uses it by now
                os.rmdir(directory)


def _closer_for(holder: DirectoryOwner | None, owner: DirectoryOwner, directory: Path) -> CloseForSuccessor:
    """Return the function that closes ``holder``, the object that has locked the directory, for the new ``owner``.

    Raises StoreLocked if ``holder`` may not be closed for ``owner``.
    """
    if holder is not None and holder.close_for_successor is not None and holder.kind == owner.kind and not holder.of_other_thread:
        close = holder.close_for_successor()
        if close is not None:
            return close
    raise locked_error(directory, holder) from None


def lock_directories(directories: Iterable[Path], owner: DirectoryOwner, locks: list[DirectoryLock]) -> None:
    """Lock directories for one object, and append each lock to ``locks`` as soon as it is held, in any order.

    Directories that other objects of this process have locked come last, and only if all of these objects can be closed. So
    no object is closed for a new one that then fails to lock another directory.

    Raises:
        StoreLocked: If a directory has another owner.
        OSError: If a directory or a lock cannot be created.
    """
    occupied = []
    for directory in directories:
        if is_locked_here(directory):
            occupied.append(directory)
        else:
            locks.append(DirectoryLock(directory, owner))
    if len(occupied) > 1:
        gc.collect()
        for directory in occupied:
            for holder in owners_of(directory / LOCK_NAME):
                _closer_for(holder, owner, directory)
    for directory in occupied:
        locks.append(DirectoryLock(directory, owner))


_owners: weakref.WeakKeyDictionary[io.FileIO, DirectoryOwner | None] = weakref.WeakKeyDictionary()
"""Owners of the files that this process has locked; None for a file that is about to be locked. A forked child closes all."""


def lock_for(owner: DirectoryOwner, file: io.FileIO, kind: int, path: Path, *, collect: bool = True) -> None:
    """Lock an open file for an object of this process. Does not wait for other holders of the lock.

    Args:
        owner: The object.
        file: The file, which keeps the lock until it is closed.
        kind: ``fcntl.LOCK_SH`` or ``fcntl.LOCK_EX``.
        path: Names the file in errors.
        collect: Whether to collect garbage and try once more if another object of this process holds the lock: that object may
            be part of an unused reference cycle.

    Raises:
        BlockingIOError: If the file is locked by another process or object.
        OSError: If the file system has no locks.
    """
    try:
        lock(file.fileno(), kind, path)
    except BlockingIOError:
        if not (collect and owners_of(file)):
            raise
        gc.collect()
        lock(file.fileno(), kind, path)
    _owners[file] = owner


def owners_of(file: io.FileIO | Path) -> list[DirectoryOwner]:
    """Return the objects for which this process has locked a file: several if they share the lock as readers.

    Args:
        file: The file, open or by its path. There are no owners of a file that does not exist.
    """
    try:
        status = os.stat(str(file)) if isinstance(file, Path) else os.fstat(file.fileno())
    except OSError:  # there is no such file
        return []
    found = []
    for reference in _owners.keyrefs():
        locked = reference()
        owner = None if locked is None else _owners.get(locked)
        with contextlib.suppress(OSError, ValueError):  # another thread closes it
            if locked is not None and owner is not None and os.path.samestat(status, os.fstat(locked.fileno())):
                found.append(owner)
    return found


def is_locked_here(directory: Path) -> bool:
    """Return whether an object of this process holds a directory's lock."""
    return bool(owners_of(directory / LOCK_NAME))


def close_in_children(file: io.FileIO) -> None:
    """Close a locked file in every child that is forked: the child would keep the lock after the parent has ended."""
    _owners[file] = None


def _close_inherited() -> None:
    """Close all files given to :func:`close_in_children`. Called in each forked child."""
    for reference in _owners.keyrefs():
        file = reference()
        if file is not None:
            file.close()


os.register_at_fork(after_in_child=_close_inherited)


def lock(descriptor: int, kind: int, path: Path) -> None:
    """Lock an open file with ``flock``. Does not wait for other holders of the lock.

    Args:
        descriptor: Descriptor of the file.
        kind: ``fcntl.LOCK_SH`` or ``fcntl.LOCK_EX``.
        path: Names the file in the error.

    Raises:
        BlockingIOError: If the file is locked through another descriptor.
        OSError: If the file system has no locks.
    """
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError as error:
        text = f"{error.strerror}: files cannot be locked here; choose a directory on another file system"
        raise OSError(error.errno, text, str(path)) from error


def unlock_and_close(file: io.FileIO, path: Path) -> None:
    """Unlock and close a file. Idempotent. The file is closed even if unlocking raises OSError."""
    with with_filename(path):
        try:
            if not file.closed:
                fcntl.flock(file.fileno(), fcntl.LOCK_UN)  # a child forked from C has the file open too, and would keep the lock
        finally:
            file.close()


def locked_error(directory: Path, owner: DirectoryOwner | None = None) -> StoreLocked:
    """Return the error for a locked directory, which names the directory's owner.

    Args:
        directory: The directory.
        owner: The object of this process that holds the lock. None to read the owner from the lock file.
    """
    if owner is not None:
        holder = f"{owner}, in another thread ({owner.thread.name!r})" if owner.of_other_thread else str(owner)
        text = f"the directory is in use by {holder}: {owner.remedy}, or choose another directory"
    else:
        try:
            file = io.FileIO(str(directory / LOCK_NAME))
        except OSError:
            return StoreLocked(errno.EBUSY, "the directory was in use just now; try again", str(directory))
        with file:
            holder = _named_owner(file.fileno())
        text = f"the directory is in use by {holder}; end that process, or choose another directory"
    error = StoreLocked(errno.EBUSY, text, str(directory))
    error.holder = holder
    return error


def _named_owner(descriptor: int) -> str:
    """Return the owner that the lock file names. Waits for the name for up to a second."""
    deadline = time.monotonic() + _NAMED_WITHIN
    while time.monotonic() < deadline:
        named = os.pread(descriptor, 2000, 0)
        if named:
            return named.decode(errors="replace")
        time.sleep(PROCESS_POLL_SECONDS)
    return "an unknown process"


def refers_to(path: Path, descriptor: int) -> bool:
    """Return whether the path refers to the open file. Raises OSError if the system cannot tell."""
    with with_filename(path):
        try:
            there = os.stat(str(path))
        except (FileNotFoundError, NotADirectoryError):
            return False
        return os.path.samestat(there, os.fstat(descriptor))
