"""A directory belongs to one owner at a time: a lock that the kernel releases when its holder dies, and that names the holder."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import json
import os
import shlex
import socket
import sys
import time
import weakref
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

LOCK_NAME = "deepnvme-store.lock"
_NAMED_WITHIN = 1.0  # seconds: a new owner writes its name right after it has the lock


class StoreLocked(OSError):
    """The directory has an owner, or is wanted by one and has readers (EBUSY); the message names the owner."""

    holder = "somebody"
    """The owner, where this knows him."""


@dataclass(frozen=True)
class LockOwner:
    """Who holds a lock."""

    pid: int
    host: str
    started: str
    """When the lock was taken: local time."""
    command: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} since {self.started} ({self.command})"


class DirectoryLock:
    """A directory's lock, held from construction to :meth:`release`; the directory is made if it is missing.

    Raises StoreLocked if another owner, of this process or any other, has it; OSError if the directory or the lock cannot be
    made. A child forked meanwhile does not share it.
    """

    _file: io.FileIO | None = None  # which closes itself, so that no lock outlives this

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._pid = os.getpid()
        self._made: list[Path] = []  # outermost first
        self._locked = False
        try:
            while not self._locked:
                self._made += reversed([path for path in (directory, *directory.parents) if not path.exists()])  # before it is
                directory.mkdir(parents=True, exist_ok=True)
                with contextlib.suppress(FileNotFoundError):  # the last owner had made the directory, and has removed it since
                    self._take()
        except BaseException:
            if self._made and not self._locked:  # what was interrupted may have left a lock file in a directory that is to go
                with contextlib.suppress(OSError):
                    self.release()
                    self._take()
            self.release()
            self._remove_made()
            raise

    def _take(self) -> None:
        path = self.directory / LOCK_NAME
        while not self._locked:
            with naming(path):
                self._file = io.FileIO(path, "a+")
            _inherited.note(self)
            descriptor = self._file.fileno()
            try:
                lock(descriptor, fcntl.LOCK_EX, path)
            except BlockingIOError:
                raise _locked(self.directory, descriptor) from None
            self._locked = _is(descriptor, path)
            if not self._locked:
                with naming(path):
                    self._file.close()  # its owner has just removed it
        with naming(path):
            _write_all(descriptor, json.dumps(asdict(_this_process())).encode())

    @property
    def held(self) -> bool:
        """Whether it has been neither released nor left to the parent of this process."""
        return self._locked and self._file is not None and not self._file.closed and os.getpid() == self._pid

    def intact(self) -> bool:
        """Whether the lock is held, and the directory and the lock in it have been neither removed nor replaced. Raises OSError
        where the system cannot tell."""
        return self.held and self._file is not None and _is(self._file.fileno(), self.directory / LOCK_NAME)

    def check(self) -> None:
        """Raise FileNotFoundError unless intact, and OSError where the system cannot tell."""
        if not self.intact():
            raise FileNotFoundError(
                errno.ENOENT, "the store's directory, or the lock in it, was removed while in use", str(self.directory)
            )

    def release(self) -> None:
        """Give the lock back and remove it, and the directory if this made it and it is empty. Idempotent; nothing in a child."""
        if self._file is None or self._file.closed or os.getpid() != self._pid:
            return
        if self._locked:
            # Unlinked while it is still held: whoever waits at the old file sees that it is not the directory's any more.
            with contextlib.suppress(OSError):
                if self.intact():
                    os.unlink(self.directory / LOCK_NAME)
            self._remove_made()
        unlock_and_close(self._file, self.directory / LOCK_NAME)

    def __del__(self) -> None:
        with contextlib.suppress(OSError):
            self.release()

    def leave_to_parent(self) -> None:
        """In a forked child: close what it inherited, or the lock would outlive the parent."""
        if self._file is not None:
            self._file.close()

    def _remove_made(self) -> None:
        for directory in reversed(self._made):
            with contextlib.suppress(OSError):  # not empty: somebody else uses it by now
                os.rmdir(directory)


class Inherited:
    """Objects with locks that a forked child is to close, or they would outlive its parent."""

    def __init__(self) -> None:
        self._alive: set[weakref.ref[Any]] = set()
        os.register_at_fork(after_in_child=self._leave_all_to_parent)

    def note(self, holder: Any) -> None:
        """``holder`` has a method ``leave_to_parent``."""
        self._alive.add(weakref.ref(holder, self._alive.discard))

    def _leave_all_to_parent(self) -> None:
        for reference in self._alive.copy():
            holder = reference()
            if holder is not None:
                holder.leave_to_parent()


_inherited = Inherited()


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """An OSError of a system call on a descriptor, or on a file that is to take this one's name, is raised as one of ``path``."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def lock(descriptor: int, kind: int, path: Path) -> None:
    """Take a lock of this kind. Never blocks. Raises BlockingIOError if others have it, OSError where none can be had."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError as error:
        text = f"{error.strerror}: files cannot be locked here; choose a directory on another file system"
        raise OSError(error.errno, text, str(path)) from error


def unlock_and_close(file: io.FileIO, path: Path) -> None:
    """Idempotent. Raises OSError, and is closed then, too."""
    with naming(path):
        try:
            if not file.closed:
                fcntl.flock(file.fileno(), fcntl.LOCK_UN)  # for a child, too, that was forked past Python and has it open
        finally:
            file.close()


def locked(directory: Path) -> StoreLocked:
    """The error that names a directory's owner, for those who have not tried to be that."""
    try:
        descriptor = os.open(directory / LOCK_NAME, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return StoreLocked(errno.EBUSY, "the directory was in use just now; try again", str(directory))
    try:
        return _locked(directory, descriptor)
    finally:
        os.close(descriptor)


def _locked(directory: Path, descriptor: int) -> StoreLocked:
    owner = next(filter(None, _reads(descriptor)), None)
    named = str(owner) if owner is not None else "a process that has not said its name"
    if owner is not None and (owner.pid, owner.host) == (os.getpid(), socket.gethostname()):
        named = f"another store of this process ({owner.pid}) since {owner.started}"
    text = f"the directory is in use by {named}; close that store, or choose another directory"
    error = StoreLocked(errno.EBUSY, text, str(directory))
    error.holder = named
    return error


def _reads(descriptor: int) -> Iterator[LockOwner | None]:
    deadline = time.monotonic() + _NAMED_WITHIN
    while time.monotonic() < deadline:
        try:
            yield LockOwner(**json.loads(os.pread(descriptor, 1 << 16, 0)))
        except (ValueError, TypeError):
            yield None  # not, or half written
            time.sleep(0.01)


def _this_process() -> LockOwner:
    command = shlex.join(getattr(sys, "orig_argv", sys.argv))[:1000]
    return LockOwner(os.getpid(), socket.gethostname(), time.strftime("%Y-%m-%d %H:%M:%S"), command)


def _write_all(descriptor: int, text: bytes) -> None:
    os.ftruncate(descriptor, 0)
    with contextlib.suppress(OSError):  # a full disk does not keep anybody from owning a directory, it keeps the name out
        os.pwrite(descriptor, text, 0)


def _is(descriptor: int, path: Path) -> bool:
    """Whether the path still leads to the open file. Raises OSError where the system cannot tell."""
    with naming(path):
        try:
            there = os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return os.path.samestat(there, os.fstat(descriptor))
