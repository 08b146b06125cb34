"""A store's file in one of its directories: its space, the two ways to it, its lock, and its bytes as mapped memory."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import mmap
import os
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from deepnvme._preallocation import free_bytes, preallocate
from deepnvme.engine import Engine, File
from deepnvme.memory.alignment import padded
from deepnvme.memory.host import map_over, reserve_addresses

from .directory_lock import Inherited, StoreLocked, lock, locked, naming, unlock_and_close
from .extents import ExtentMap
from .futures import check_not_owned

if TYPE_CHECKING:
    import torch


DATA_NAME = "deepnvme-store.data"
_SMALLEST_STEP = 16 << 20
_LARGEST_STEP = 1 << 30


class DataFile:
    """Opened and locked; made if missing, by the directory's owner. With ``read_only``, for one reader of several.

    The lock is the file's own, so that readers need nothing but to read: whoever owns the directory is kept out by them. Raises
    StoreLocked, and OSError from opening. A child forked meanwhile does not share the lock.

    Space is preallocated in large steps: writes past the end of a file are slow (design, section 4), and a disk that is full is
    known before a byte is written.
    """

    def __init__(self, directory: Path, engine: Engine, weight: float, read_only: bool = False) -> None:
        self.directory = directory
        self.path = directory / DATA_NAME
        self.weight = weight
        self.extents = ExtentMap()
        self._growing = threading.RLock()  # not the store's lock: a drive that hangs in fallocate holds up growth alone
        with naming(self.path):
            self._file = io.FileIO(self.path, "r" if read_only else "a+")  # which closes itself, so that no lock outlives this
        try:
            _inherited.note(self)
            self._lock(read_only)
            with naming(self.path):
                self.capacity = os.fstat(self.descriptor).st_size
            self.file: File = engine.open(str(self.path), "r" if read_only else "rw", whole_pages=True)
        except BaseException:
            with contextlib.suppress(OSError):  # it is closed in any case, and this is not what went wrong
                self._file.close()
            raise

    @property
    def descriptor(self) -> int:
        """For mappings, which work after the file has lost its name, too."""
        return self._file.fileno()

    def grow_to(self, size: int, exactly: bool = False) -> None:
        """Have ``size`` bytes preallocated, or more unless ``exactly``. Waits for the drive: not with the store's lock held.

        Raises OSError (ENOSPC) and leaves the file as it was; RuntimeError in a finalizer or signal handler that has interrupted
        this thread's own growth of the file.
        """
        check_not_owned(self._growing)
        with self._growing:
            if size <= self.capacity:
                return
            step = min(max(self.capacity, _SMALLEST_STEP), _LARGEST_STEP)
            wanted, generous = padded(size), padded(self.capacity + step)
            if not exactly and generous > wanted and generous - self.capacity <= self.free() // 2:
                wanted = generous
            remedy = "make room, or give this directory a smaller weight or another disk"
            preallocate(self.descriptor, self.capacity, wanted, str(self.directory), remedy)
            self.capacity = wanted

    def trim(self, size: int) -> None:
        """Give back what lies past ``size`` bytes."""
        if size < self.capacity:
            with naming(self.path):
                os.ftruncate(self.descriptor, size)
            self.capacity = size

    def free(self) -> int:
        """Bytes that the file system has left for this user."""
        return free_bytes(self.descriptor, str(self.directory))

    def remove(self) -> None:
        """Unlink it, unless something else has its path by now. Transfers under way go on, into a file without a name."""
        if self._file.closed:
            return
        with contextlib.suppress(OSError):
            if os.path.samestat(os.stat(self.path), os.fstat(self.descriptor)):
                os.unlink(self.path)

    def close(self) -> None:
        """Idempotent. Raises OSError, and is closed then, too."""
        try:
            self.file.close()
        finally:
            unlock_and_close(self._file, self.path)

    def leave_to_parent(self) -> None:
        """In a forked child: close what it inherited, or the lock would outlive the parent."""
        self._file.close()

    def _lock(self, read_only: bool) -> None:
        try:
            lock(self.descriptor, fcntl.LOCK_SH if read_only else fcntl.LOCK_EX, self.path)
        except BlockingIOError:
            if read_only:
                raise locked(self.directory) from None
            text = "the store here is open for reading, in this process or another; close it there, or choose another directory"
            raise StoreLocked(errno.EBUSY, text, str(self.directory)) from None


_inherited = Inherited()


def remove(directory: Path) -> None:
    """Remove the data file that an owner has left in the directory, if there is one."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(directory / DATA_NAME)


def map_files(parts: Iterable[tuple[DataFile, int, int]], nbytes: int) -> torch.Tensor:
    """Bytes that stand for those in the files, one part after the other: private, copied when written to.

    ``parts``: file, offset and length of each; all but the last are multiples of ALIGNMENT. The mapping goes with the last view
    of the tensor, and needs no descriptor. Raises OSError.
    """
    import torch

    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    memory = reserve_addresses(nbytes)  # the whole range first, so that the parts can lie side by side in it
    place = memory.data_ptr()
    for file, offset, length in parts:
        with naming(file.path):
            size = os.fstat(file.descriptor).st_size
            if offset + length > size:  # a page past the end would end the process when it is touched
                text = f"bytes [{offset}, {offset + length}) are to be mapped, and the file was cut off at byte {size}"
                raise OSError(errno.EBADMSG, text)
            map_over(place, length, mmap.PROT_READ | mmap.PROT_WRITE, 0, file.descriptor, offset)
        place += length
    return memory
