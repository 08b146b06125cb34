"""Write a file so that it appears under its name whole or not at all: a temporary file, renamed when it is complete.

Invariants:

1. The path names the old file, or no file, until all bytes of the new file are written, with ``fsync`` until they are
   on stable storage.
2. A temporary file ends in ``.deepnvme-tmp`` and is locked by ``flock`` while its process lives. A file of such a
   name that is not locked is a leftover of a dead process, and any process may remove it.
3. A process that has locked a temporary file then checks that the name still refers to the locked file: another process may
   have removed the file as a leftover before it was locked.
4. A file that is recycled loses its old name, durably with ``fsync``, before a byte of it is overwritten. It is
   overwritten only if no other descriptor, mapping or name refers to it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import logging
import os
import secrets
import signal
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from deepnvme.engine import Engine, File
from deepnvme.files.preallocation import preallocate
from deepnvme.files.replacing import sync_directory
from deepnvme.telemetry.descriptions import printable
from deepnvme.telemetry.profiler_ranges import profiler_range

from .file_io import shared_engine

if TYPE_CHECKING:
    from deepnvme.drives.aio_config import AioConfig

_logger = logging.getLogger(__name__)

SUFFIX = ".deepnvme-tmp"
"""Suffix of the names of temporary files. A temporary file that is being written is locked; one of a dead process is not."""
_LONGEST_NAME = 255 - len(SUFFIX) - 10
"""Most bytes of the final name that the temporary name repeats: a name may have 255 bytes in all."""


@dataclass(frozen=True)
class Destination:
    """Where and how a file is published, with callbacks before it is written and after it has its final name."""

    path: Path
    """Final path. If it is a symbolic link, the link stays and its target is replaced."""
    fsync: bool = True
    """Whether the file is flushed to stable storage before the rename, and the directory after it."""
    recycle: Callable[[], Path | None] = lambda: None
    """Called before the file is written. Returns a file in the same directory to overwrite in place, or None.

    The returned file is renamed to the temporary name. It is removed instead, and a new file made, if it has another
    name, if any process has it open or mapped, if that cannot be determined, or if it may not be written to. It is left
    alone if it is not a regular file or may not be renamed.
    """
    end: Callable[[], object] = lambda: None
    """Called after publication. If it raises, the message has to say that the file is saved."""
    aio_config: AioConfig | None = None
    """Settings of the engine; None for the profile of the drive."""

    def engine(self) -> Engine:
        """Return the engine that writes the file. Looks up the drive; raises what :func:`shared_engine` raises."""
        return shared_engine(self.path, self.aio_config)

    def publish(self, engine: Engine, nbytes: int, write: Callable[[File], None]) -> None:
        """Write a temporary file, and rename it to its final name when it is complete. Blocks.

        Args:
            engine: Engine that opens and flushes the file.
            nbytes: Size of the file in bytes.
            write: Writes the whole file.

        Raises:
            OSError: As for :class:`Publication`.
        """
        begun = time.perf_counter()
        with profiler_range("save"), Publication(self, nbytes, engine) as new:
            write(new.file)
            new.publish()
        self.end()
        _logger.info("saved '%s': %d bytes in %.3f s", printable(self.path), nbytes, time.perf_counter() - begun)


class Publication:
    """A preallocated temporary file beside its destination, which :meth:`publish` renames to the destination's path.

    >>> with Publication(Destination(path), nbytes, engine) as new:
    ...     engine.write(tensor, new.file).result()
    ...     new.publish()

    Nothing is created before ``with`` is entered. Leaving ``with`` without :meth:`publish` removes the temporary file.
    Entering ``with`` also removes the temporary files that dead processes have left in the directory.

    Entering ``with`` raises OSError naming the final path: IsADirectoryError; FileNotFoundError or PermissionError from
    the directory; or ENOSPC with the bytes needed and the bytes free. If the block raises an OSError that names the
    temporary file, it is changed to name the final path.

    Args:
        destination: Where and how the file is published.
        nbytes: Size of the file in bytes.
        engine: Engine that opens and flushes the file.
    """

    def __init__(self, destination: Destination, nbytes: int, engine: Engine) -> None:
        self.path = Path(os.path.realpath(destination.path))
        self._destination = destination
        self._name = str(destination.path)
        self._nbytes = nbytes
        self._engine = engine
        self._locked: io.FileIO | None = None
        self._file: File | None = None

    @property
    def temporary(self) -> Path:
        """Path of the temporary file, from :meth:`begin` on."""
        assert self._locked is not None
        return Path(self._locked.name)

    @property
    def file(self) -> File:
        """The temporary file, open for writing, from :meth:`begin` on."""
        assert self._file is not None
        return self._file

    def begin(self) -> None:
        """Create the temporary file. ``with`` calls this; a caller without ``with`` calls :meth:`discard` after any error."""
        if self.path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), self._name)
        if self.path.exists() and not self.path.is_file():
            raise OSError(errno.EINVAL, "neither a regular file nor the name of a new one", self._name)
        recycle = self._destination.recycle()
        try:
            remove_leftovers(self.path.parent)
            if recycle is not None:
                self._locked = _recycled(self.path, recycle, durably=self._destination.fsync)
            if self._locked is None:
                self._locked = _start(self.path)
            self._set_size(self._locked.fileno())
            self._file = self._engine.open(self._locked.name, "r+")
        except OSError as error:
            raise OSError(error.errno, error.strerror, self._name) from error

    def publish(self) -> None:
        """Rename the temporary file to its final path, replacing the file at that path if there is one. Blocks.

        With ``fsync`` the file is flushed before the rename, and the directory after it.

        Raises:
            OSError: From the step that failed. The path then still refers to the old file or to none, unless the message says
                that the new file is in place. In that case either the directory could not be flushed, so that a power cut may
                bring the old file back, or the new file could not be unlocked and closed.
        """
        try:
            if self._destination.fsync:
                self._engine.fsync(self.file).result()
            self.file.close()  # some file systems report failed writes only here
            os.replace(self.temporary, self.path)
        except OSError as error:
            name_the_final_file(error, str(self.temporary), self._name)
            raise
        what = "it was unlocked and closed: the new file is in place, and was written and closed before"
        try:
            self._close()
            what = "the directory was flushed: the new file is in place, but a power cut may undo that"
            if self._destination.fsync:
                sync_directory(self.path.parent)
        except OSError as error:
            raise OSError(error.errno, f"{error.strerror}, when {what}", self._name) from error

    def discard(self) -> None:
        """Remove the temporary file, unless it was published. Idempotent."""
        if self._locked is not None and not self._locked.closed:
            with contextlib.suppress(OSError):
                os.unlink(self._locked.name)
            with contextlib.suppress(OSError):  # a failed write no longer matters
                self._close()

    def __enter__(self) -> Publication:
        try:
            self.begin()
            return self
        except BaseException:  # begin() may have created the file
            self.discard()
            raise

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.discard()
        if isinstance(error, OSError) and self._locked is not None:
            name_the_final_file(error, self._locked.name, self._name)

    def _close(self) -> None:
        """Close and unlock the temporary file. Idempotent."""
        if self._file is not None:
            self._file.close()
        if self._locked is not None and not self._locked.closed:
            fcntl.flock(self._locked, fcntl.LOCK_UN)  # closing is not enough: a child forked meanwhile has it open too
            self._locked.close()

    def _set_size(self, descriptor: int) -> None:
        """Give the temporary file its final size and reserve all of its space."""
        size = os.fstat(descriptor).st_size
        if size > self._nbytes:
            os.ftruncate(descriptor, self._nbytes)
        preallocate(descriptor, size, self._nbytes, str(self.path), "make room, or save to another disk")


def name_the_final_file(error: OSError, temporary: str, path: str) -> None:
    """If an error's ``filename`` is the temporary file, set it to the final path.

    The temporary file is gone by then, and its name would tell the user nothing.
    """
    if error.filename == temporary:
        error.filename = path
        del error.filename2


def remove_leftovers(directory: Path) -> None:
    """Remove the temporary files that dead processes have left in the directory."""
    for name in os.listdir(directory):  # scandir would leave an iterator open where Ctrl-C comes
        path = os.path.join(directory, name)
        with contextlib.suppress(OSError):  # in use, not ours to remove, or already gone
            if name.endswith(SUFFIX) and stat.S_ISREG(os.lstat(path).st_mode):
                _remove_leftover(path)


def _remove_leftover(name: str) -> None:
    """Remove a temporary file. Raises BlockingIOError if a process is writing it."""
    with io.FileIO(name, "r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is(file.fileno(), name):
            os.unlink(name)


def _start(path: Path) -> io.FileIO:
    """Create and return a locked temporary file for ``path``."""

    def take_mode(file: io.FileIO) -> bool:
        """Give the new file the permissions of the file that it replaces, if there is one."""
        with contextlib.suppress(OSError):
            os.fchmod(file.fileno(), os.stat(path).st_mode & 0o777)  # no setuid: its owner may be another
        return True

    while (file := _open_locked(_temporary_name(path), "x+", take_mode)) is None:
        pass
    return file


def _recycled(path: Path, recycle: Path, durably: bool) -> io.FileIO | None:
    """Rename ``recycle`` to a temporary name for ``path``, lock the file and return it; None if a new file must be created."""
    temporary = _temporary_name(path)
    try:
        if not stat.S_ISREG(os.lstat(recycle).st_mode):
            return None
        os.rename(recycle, temporary)
    except (FileNotFoundError, PermissionError):
        return None

    def is_unshared(file: io.FileIO) -> bool:
        """Return whether nothing else uses the file, so that it may be overwritten; first make its renaming durable."""
        if durably:  # otherwise, after a power cut, its old name could refer to the new bytes
            sync_directory(path.parent)
        return _is_ours_alone(file.fileno())

    try:
        return _open_locked(temporary, "r+", is_unshared)
    except (FileNotFoundError, PermissionError) as error:  # a leftover that another process removed; or not ours to write
        if error.filename != temporary:
            raise
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        return None


def _open_locked(name: str, mode: str, is_usable: Callable[[io.FileIO], bool]) -> io.FileIO | None:
    """Open and lock a temporary file and return it. Remove the file instead if it is not usable, or after an error.

    Returns:
        None if the file was removed: here, or by another process as a leftover, before it was locked.

    Raises:
        OSError: If the file cannot be opened or locked, or is not usable and cannot be removed. Such a file takes space
            that the save needs.
    """
    file = io.FileIO(name, mode)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        if _is(file.fileno(), name):
            if is_usable(file):
                return file
            os.unlink(name)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        file.close()
        raise
    file.close()
    return None


def _temporary_name(path: Path) -> str:
    """Return a new, random path for a temporary file in the directory of ``path``."""
    name = os.fsencode(path.name)[:_LONGEST_NAME]
    return str(path.parent / os.fsdecode(b".%s.%s%s" % (name, secrets.token_hex(4).encode(), SUFFIX.encode())))


def _is_ours_alone(descriptor: int) -> bool:
    """Return whether the file has one name and no other process or mapping uses it. False if the file system cannot tell."""
    try:
        # If another process opens the file during the lease, this one gets a signal. The default, SIGIO, would end it; SIGURG is
        # ignored by default.
        fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGURG)
        # A write lease is granted only if nothing else has the file open, neither a descriptor nor a mapping.
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except OSError:
        return False
    return os.fstat(descriptor).st_nlink == 1


def _is(descriptor: int, path: str) -> bool:
    """Return whether the path refers to the open file."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False
