"""A file that appears under its name whole, or not at all."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import signal
import stat
from pathlib import Path
from types import TracebackType

from deepnvme._preallocation import preallocate
from deepnvme.engine import Engine, File

SUFFIX = ".deepnvme-tmp"
"""Of files that are being written. A lock tells those from what a dead process has left."""
_LONGEST_NAME = 255 - len(SUFFIX) - 10
"""Bytes of the final name that the temporary one repeats: a name has 255."""


class Publication:
    """A temporary file beside ``path``, preallocated, that :meth:`publish` gives its name.

    >>> with Publication(path, nbytes, engine) as new:
    ...     engine.write(tensor, new.file).result()
    ...     new.publish()

    Leaving ``with`` unpublished removes it. What dead processes have left in the directory is removed at the start.

    ``recycle``: a file of the same directory that becomes the temporary one, and whose blocks are written over: its name is gone
    from the start. It is only removed where it has another name, where anybody has it open or mapped, where that cannot be
    told, or where it may not be written to; and left alone where it is no regular file or may not be renamed. A ``path`` that
    is a symbolic link stays one.

    ``one_of_many``: whoever publishes many files of a directory calls :func:`remove_leftovers` before the first and
    :func:`sync_directory` after the last; both look at all of it.

    Raises OSError naming ``path``: IsADirectoryError, FileNotFoundError or PermissionError from its directory, and ENOSPC with
    the bytes wanted and those free.
    """

    def __init__(
        self,
        path: Path,
        nbytes: int,
        engine: Engine,
        *,
        fsync: bool = True,
        recycle: Path | None = None,
        one_of_many: bool = False,
    ) -> None:
        self.path = Path(os.path.realpath(path))
        self._engine = engine
        self._fsync = fsync
        self._one_of_many = one_of_many
        if self.path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if self.path.exists() and not self.path.is_file():
            raise OSError(errno.EINVAL, "neither a regular file nor the name of a new one", str(path))
        try:
            if not one_of_many:
                remove_leftovers(self.path.parent)
            recycled = None if recycle is None else _recycled(self.path, recycle, durably=fsync)
            self.temporary, self._descriptor = recycled or _start(self.path)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from error
        try:
            self._set_size(nbytes)
            self.file: File = engine.open(str(self.temporary), "r+")
        except BaseException:
            self.discard()
            raise

    def publish(self) -> None:
        """Give the file its name, in place of what has it now; flushed before and after, unless without ``fsync``. Blocks.

        Raises the OSError of what failed. Either file is whole under the name then.
        """
        if self._fsync:
            self._engine.fsync(self.file).result()
        os.replace(self.temporary, self.path)
        descriptor, self._descriptor = self._descriptor, -1
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # a child that was forked meanwhile has it open still, as long as it lives
        os.close(descriptor)
        self.file.close()
        if self._fsync and not self._one_of_many:
            sync_directory(self.path.parent)

    def discard(self) -> None:
        """Remove the temporary file, unless it was published. Idempotent."""
        if self._descriptor < 0:
            return
        descriptor, self._descriptor = self._descriptor, -1
        with contextlib.suppress(OSError):
            os.unlink(self.temporary)
        os.close(descriptor)
        if hasattr(self, "file"):
            self.file.close()

    def __enter__(self) -> Publication:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.discard()

    def _set_size(self, nbytes: int) -> None:
        size = os.fstat(self._descriptor).st_size
        if size > nbytes:
            os.ftruncate(self._descriptor, nbytes)
        preallocate(self._descriptor, size, nbytes, str(self.path), "make room, or save to another disk")


def remove_leftovers(directory: Path) -> None:
    """Remove what processes that are dead were writing in the directory."""
    for entry in os.scandir(directory):
        if not entry.name.endswith(SUFFIX):
            continue
        with contextlib.suppress(OSError):  # another's to remove, or gone by now
            descriptor = os.open(entry.path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is(descriptor, Path(entry.path)):
                    os.unlink(entry.path)
            finally:
                os.close(descriptor)


def sync_directory(directory: Path) -> None:
    """Have the names in it on stable storage."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _start(path: Path) -> tuple[Path, int]:
    """A locked temporary file for ``path``, and its descriptor."""
    while True:
        temporary = _temporary_name(path)
        descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            # Before it was locked, another may have taken it for a dead process's.
            if _is(descriptor, temporary):
                with contextlib.suppress(OSError):
                    os.fchmod(descriptor, os.stat(path).st_mode & 0o777)  # whose owner may be another
                return temporary, descriptor
        except BaseException:
            os.close(descriptor)
            os.unlink(temporary)
            raise
        os.close(descriptor)


def _recycled(path: Path, recycle: Path, durably: bool) -> tuple[Path, int] | None:
    """The same, of a file that was there; None where a new one has to be made."""
    temporary = _temporary_name(path)
    try:
        if not stat.S_ISREG(os.lstat(recycle).st_mode):
            return None
        os.rename(recycle, temporary)
    except (FileNotFoundError, PermissionError):
        return None
    try:
        descriptor = os.open(temporary, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:  # another has taken it for a dead process's
        return None
    except PermissionError:
        os.unlink(temporary)
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if _is(descriptor, temporary):
            if durably:  # or a power cut could leave its old name to what is going to be written
                sync_directory(path.parent)
            if _is_ours_alone(descriptor):
                return temporary, descriptor
            os.unlink(temporary)
    except BaseException:
        os.close(descriptor)
        os.unlink(temporary)
        raise
    os.close(descriptor)
    return None


def _temporary_name(path: Path) -> Path:
    name = os.fsencode(path.name)[:_LONGEST_NAME]
    return path.parent / os.fsdecode(b".%s.%s%s" % (name, secrets.token_hex(4).encode(), SUFFIX.encode()))


def _is_ours_alone(descriptor: int) -> bool:
    """Whether the file has one name, and nobody else has it open or mapped. False where the file system cannot tell."""
    try:
        # Who opens it meanwhile has this process sent a signal: SIGIO, which would end it, or one that is ignored by default.
        fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGURG)
        # Granted only where there is no other descriptor, whether a process has it or a mapping.
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except OSError:
        return False
    return os.fstat(descriptor).st_nlink == 1


def _is(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False
