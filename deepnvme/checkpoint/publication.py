"""A file that appears under its name whole, or not at all."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import os
import secrets
import signal
import stat
from pathlib import Path
from types import TracebackType

from deepnvme._interrupts import defer_interrupts
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

    Nothing is done before ``with`` is entered. Leaving it unpublished removes the temporary file. What dead processes have left
    in the directory is removed at the start.

    ``recycle``: a file of the same directory that becomes the temporary one, and whose blocks are written over: its name is gone
    from the start. It is only removed where it has another name, where anybody has it open or mapped, where that cannot be
    told, or where it may not be written to; and left alone where it is no regular file or may not be renamed. A ``path`` that
    is a symbolic link stays one.

    ``one_of_many``: whoever publishes many files of a directory calls :func:`remove_leftovers` before the first and
    :func:`sync_directory` after the last; both look at all of it.

    ``with`` raises OSError naming ``path``: IsADirectoryError, FileNotFoundError or PermissionError from its directory, and
    ENOSPC with the bytes wanted and those free. An OSError that names the temporary file names ``path`` when it leaves ``with``.
    """

    # Ctrl-C may come after any call and at the beginning of any function. So descriptors are held by objects that close them
    # when they are dropped, from the call that opens them on; and they are opened in __enter__, from which `with` goes on to its
    # block without another look for signals, and not in __init__, after which there is one.

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
        self._name = str(path)
        self._nbytes = nbytes
        self._engine = engine
        self._fsync = fsync
        self._recycle = recycle
        self._one_of_many = one_of_many
        self._locked: io.FileIO | None = None
        self._file: File | None = None

    @property
    def temporary(self) -> Path:
        """The temporary file. ValueError before :meth:`begin`."""
        if self._locked is None:
            raise ValueError(f"the publication of '{self._name}' has not begun")
        return Path(self._locked.name)

    @property
    def file(self) -> File:
        """The temporary file, to be written to. ValueError before :meth:`begin`."""
        if self._file is None:
            raise ValueError(f"the publication of '{self._name}' has not begun")
        return self._file

    def begin(self) -> None:
        """Make the temporary file: what entering ``with`` does. After an error there is none."""
        if self.path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), self._name)
        if self.path.exists() and not self.path.is_file():
            raise OSError(errno.EINVAL, "neither a regular file nor the name of a new one", self._name)
        try:
            if not self._one_of_many:
                remove_leftovers(self.path.parent)
            if self._recycle is not None:
                self._locked = _recycled(self.path, self._recycle, durably=self._fsync)
            if self._locked is None:
                self._locked = _start(self.path)
            self._set_size(self._locked.fileno())
            self._file = self._engine.open(self._locked.name, "r+")
        except OSError as error:
            self.discard()
            raise OSError(error.errno, error.strerror, self._name) from error
        except BaseException:
            self.discard()
            raise

    def publish(self) -> None:
        """Give the file its name, in place of what has it now; flushed before and after, unless without ``fsync``. Blocks.

        Raises the OSError of what failed: the old file, or none, has the name then. Only where the message says that the new file
        is in place, it is: its directory could not be flushed, so that the old one may be there again after a power cut; or what
        locked it could not be closed.
        """
        try:
            if self._fsync:
                self._engine.fsync(self.file).result()
            self.file.close()  # where some file systems first say that they could not write
            os.replace(self.temporary, self.path)
        except OSError as error:
            name_the_final_file(error, str(self.temporary), self._name)
            raise
        what = "it was unlocked and closed: the new file is in place, and was written and closed before"
        try:
            self._close()
            what = "the directory was flushed: the new file is in place, but a power cut may undo that"
            if self._fsync and not self._one_of_many:
                sync_directory(self.path.parent)
        except OSError as error:
            raise OSError(error.errno, f"{error.strerror}, when {what}", self._name) from error

    def discard(self) -> None:
        """Remove the temporary file, unless it was published. Idempotent."""
        if self._locked is not None and not self._locked.closed:
            with contextlib.suppress(OSError):
                os.unlink(self._locked.name)
            with contextlib.suppress(OSError):  # of bytes that nobody wants any more
                self._close()

    def __enter__(self) -> Publication:
        try:
            self.begin()
            return self
        except BaseException:  # Ctrl-C after it has begun
            self.discard()
            raise

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.discard()
        if isinstance(error, OSError) and self._locked is not None:
            name_the_final_file(error, self._locked.name, self._name)

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
        if self._locked is not None and not self._locked.closed:
            fcntl.flock(self._locked, fcntl.LOCK_UN)  # a child that was forked meanwhile has it open still, as long as it lives
            self._locked.close()

    def _set_size(self, descriptor: int) -> None:
        size = os.fstat(descriptor).st_size
        if size > self._nbytes:
            os.ftruncate(descriptor, self._nbytes)
        preallocate(descriptor, size, self._nbytes, str(self.path), "make room, or save to another disk")


def name_the_final_file(error: OSError, temporary: str, path: str) -> None:
    """Have an error that names the temporary file name the one that it was to become: the other is gone, and told nobody."""
    if error.filename == temporary:
        error.filename = path
        del error.filename2


def remove_leftovers(directory: Path) -> None:
    """Remove what processes that are dead were writing in the directory."""
    with os.scandir(directory) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):  # another's to remove, or gone by now
                if entry.name.endswith(SUFFIX) and entry.is_file(follow_symlinks=False):
                    _remove_leftover(entry.path)


def _remove_leftover(name: str) -> None:
    with io.FileIO(name, "r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is(file.fileno(), name):
            os.unlink(name)


def sync_directory(directory: Path) -> None:
    """Have the names in it on stable storage. Raises OSError naming it."""
    try:
        with defer_interrupts():  # no object closes a directory's descriptor when it is dropped
            descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(directory)) from error


def _start(path: Path) -> io.FileIO:
    """A locked temporary file for ``path``."""
    while True:
        file = io.FileIO(_temporary_name(path), "x+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            # Before it was locked, another may have taken it for a dead process's.
            if _is(file.fileno(), file.name):
                with contextlib.suppress(OSError):
                    os.fchmod(file.fileno(), os.stat(path).st_mode & 0o777)  # whose owner may be another
                return file
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(file.name)
            file.close()
            raise
        file.close()


def _recycled(path: Path, recycle: Path, durably: bool) -> io.FileIO | None:
    """The same, of a file that was there; None where a new one has to be made."""
    temporary = _temporary_name(path)
    try:
        if not stat.S_ISREG(os.lstat(recycle).st_mode):
            return None
        os.rename(recycle, temporary)
    except (FileNotFoundError, PermissionError):
        return None
    try:
        file = io.FileIO(temporary, "r+")
    except FileNotFoundError:  # another has taken it for a dead process's
        return None
    except PermissionError:
        os.unlink(temporary)
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        if _is(file.fileno(), temporary):
            if durably:  # or a power cut could leave its old name to what is going to be written
                sync_directory(path.parent)
            if _is_ours_alone(file.fileno()):
                return file
            os.unlink(temporary)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        file.close()
        raise
    file.close()
    return None


def _temporary_name(path: Path) -> str:
    name = os.fsencode(path.name)[:_LONGEST_NAME]
    return str(path.parent / os.fsdecode(b".%s.%s%s" % (name, secrets.token_hex(4).encode(), SUFFIX.encode())))


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


def _is(descriptor: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False
