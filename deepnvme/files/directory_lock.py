"""A lock that gives a directory one owner at a time.

The kernel releases it when its holder dies, and the lock file names the holder. Within a process, each lock is held for an object
of the user's. Garbage is collected before a lock is refused. An object whose class allows it (``OffloadedOptimizer``) is closed
when another of its class is made on the directory; every other is kept, and the error names it.

1. A process owns a directory while it has an exclusive flock of the lock file, and the path still refers to that file.
2. The lock file is unlinked only while it is locked. Whoever locks it afterwards finds that the path refers to another file.
3. A forked child closes its copy of the file, so that the lock ends with the parent.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import io
import json
import os
import shlex
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from deepnvme._polling import PROCESS_POLL_SECONDS
from deepnvme.files.replacing import with_filename
from deepnvme.telemetry.callers import caller

LOCK_NAME = "deepnvme-store.lock"
_NAMED_WITHIN = 1.0  # seconds: a new owner writes its name right after it has the lock


class StoreLocked(OSError):
    """The directory has an owner, or is to have one while it still has readers (EBUSY). The message names the owner."""

    holder = "an unknown process"
    """The owner, as text, where it is known."""


@dataclass(frozen=True)
class LockOwner:
    """The process that holds a lock."""

    pid: int
    host: str
    started: str
    """When the lock was taken, in local time."""
    command: str
    """The process's command line, cut off after 1000 characters."""
    kind: str = ""
    """Class of the object that the directory is locked for."""

    def __str__(self) -> str:
        kind = f"the {self.kind} of " if self.kind else ""
        return f"{kind}process {self.pid} on {self.host} since {self.started} ({self.command})"


CloseForSuccessor = Callable[["DirectoryOwner", Path], None]
"""Closes an object for a new one on the same directory. Raises RuntimeError or OSError if the object cannot be closed now."""


@dataclass(frozen=True, eq=False)
class DirectoryOwner:
    """The object of this process that a directory is locked for. Errors name it."""

    kind: str
    """Its class, as its user knows it."""
    remedy: str = "call its close()"
    """What its user can do to free the directory."""
    close_for_successor: weakref.WeakMethod[CloseForSuccessor] | None = None
    """Called when another object of this kind is made on the directory, by the same thread or after the end of that thread.
    None if the object refuses that."""
    made_at: str = field(default_factory=caller)
    """Where in the user's program it was made."""
    thread: threading.Thread = field(default_factory=threading.current_thread)
    """The thread that has made it."""
    failures: list[str] = field(default_factory=list)
    """Why it could not be made, once that is so. Others may have been closed for it before."""

    def __str__(self) -> str:
        return f"the {self.kind} of this process ({os.getpid()}) that was made at {self.made_at}"

    @property
    def of_other_thread(self) -> bool:
        """Whether another thread, which still runs, has made the object."""
        return self.thread is not threading.current_thread() and self.thread.is_alive()


class DirectoryLock:
    """The lock of a directory, held from construction to :meth:`release`. The directory is created if it is missing.

    A child forked meanwhile does not share the lock.

    If an object of this process has the lock, garbage is collected first. If the object is still there, it is closed, if it is of
    the new owner's kind and allows that.

    Args:
        directory: The directory.
        owner: For whom it is locked; None for whoever makes this object.
        collect: Whether to collect garbage.

    Raises:
        StoreLocked: If another owner, in this process or any other, has it.
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

    def _take(self) -> None:
        """Take the lock and write who has it into the lock file. Raises StoreLocked."""
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
        command = shlex.join(getattr(sys, "orig_argv", sys.argv))[:1000]
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        owner = LockOwner(os.getpid(), socket.gethostname(), since, command, self._owner.kind)
        with with_filename(path):
            os.ftruncate(descriptor, 0)
            with contextlib.suppress(OSError):  # on a full disk the lock still works, only the owner's name is missing
                os.pwrite(descriptor, json.dumps(asdict(owner)).encode(), 0)

    def _close_holder(self, file: io.FileIO) -> None:
        """Close the object of this process that the file is locked for. Raises StoreLocked if that is not possible."""
        holder = next(iter(owners_of(file)), None)
        if holder is not None and holder is self._asked:
            raise locked_error(self.directory, holder) from None
        close = _closing_of(holder, self._owner, self.directory)
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
        """Check that the lock is intact.

        Raises:
            FileNotFoundError: If it is not.
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


def _closing_of(holder: DirectoryOwner | None, owner: DirectoryOwner, directory: Path) -> CloseForSuccessor:
    """Return what closes the object that has a directory, for another one. Raises StoreLocked if it does not allow that."""
    if holder is not None and holder.close_for_successor is not None and holder.kind == owner.kind and not holder.of_other_thread:
        close = holder.close_for_successor()
        if close is not None:
            return close
    raise locked_error(directory, holder) from None


def lock_directories(directories: Iterable[Path], owner: DirectoryOwner, locks: list[DirectoryLock]) -> None:
    """Lock directories for one object, and append each lock to ``locks`` when it is held, in any order.

    Directories that objects of this process have locked come last, and only if all of these objects can be closed. So no object
    is closed for a new one that then fails to lock another directory.

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
                _closing_of(holder, owner, directory)
    for directory in occupied:
        locks.append(DirectoryLock(directory, owner))


_owners: weakref.WeakKeyDictionary[io.FileIO, DirectoryOwner | None] = weakref.WeakKeyDictionary()
"""For whom this process has files locked; None for a file that is about to be. A forked child closes all of them."""


def lock_for(owner: DirectoryOwner, file: io.FileIO, kind: int, path: Path, *, collect: bool = True) -> None:
    """Take a lock on an open file for an object. Never blocks for others.

    Args:
        owner: The object.
        file: The file, which keeps the lock until it is closed.
        kind: ``fcntl.LOCK_SH`` or ``fcntl.LOCK_EX``.
        path: Names the file in errors.
        collect: Whether to collect garbage, and try again, if an object of this process has the lock. It may be in a cycle that
            nobody has any more.

    Raises:
        BlockingIOError: If others have the lock.
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
    """Return for whom this process has a file locked, given open or by its path: several objects if they read it."""
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
    """Return whether an object of this process has a directory locked."""
    return bool(owners_of(directory / LOCK_NAME))


def close_in_children(file: io.FileIO) -> None:
    """Have a forked child close a locked file: it would keep the lock after the parent has ended."""
    _owners[file] = None


def _close_inherited() -> None:
    """Close all locked files, in a forked child."""
    for reference in _owners.keyrefs():
        file = reference()
        if file is not None:
            file.close()


os.register_at_fork(after_in_child=_close_inherited)


def lock(descriptor: int, kind: int, path: Path) -> None:
    """Take a lock on an open file. Never blocks.

    Args:
        descriptor: The file.
        kind: ``fcntl.LOCK_SH`` or ``fcntl.LOCK_EX``.
        path: Names the file in the error.

    Raises:
        BlockingIOError: If others have the lock.
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
    """Unlock and close a file. Idempotent. If it raises OSError, the file is closed all the same."""
    with with_filename(path):
        try:
            if not file.closed:
                fcntl.flock(file.fileno(), fcntl.LOCK_UN)  # a child forked from C has the file open too, and would keep the lock
        finally:
            file.close()


def locked_error(directory: Path, owner: DirectoryOwner | None = None) -> StoreLocked:
    """Return the error that names a directory's owner.

    Args:
        directory: The directory.
        owner: The object of this process that has it; None if that is not known. Then the lock file says whose it is.
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
            named = _owner(file.fileno())
        holder = str(named) if named is not None else "an unknown process"
        text = f"the directory is in use by {holder}; end that process, or choose another directory"
    error = StoreLocked(errno.EBUSY, text, str(directory))
    error.holder = holder
    return error


def _owner(descriptor: int) -> LockOwner | None:
    """Return the owner that the lock file names, or None if none is written for a second. Blocks until then."""
    deadline = time.monotonic() + _NAMED_WITHIN
    while time.monotonic() < deadline:
        try:
            return LockOwner(**json.loads(os.pread(descriptor, 1 << 16, 0)))  # without "kind": an earlier version's
        except (ValueError, TypeError):
            time.sleep(PROCESS_POLL_SECONDS)  # not written yet, or only in part
    return None


def refers_to(path: Path, descriptor: int) -> bool:
    """Return whether the path still is that of the open file. Raises OSError if the system cannot tell."""
    with with_filename(path):
        try:
            there = os.stat(str(path))
        except (FileNotFoundError, NotADirectoryError):
            return False
        return os.path.samestat(there, os.fstat(descriptor))
