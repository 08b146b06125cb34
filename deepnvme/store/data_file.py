"""A store's data file in one of its directories: opening, locking, growing and mapping it into memory."""

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

import torch

from deepnvme.engine import Engine, File
from deepnvme.files.directory_lock import (
    DirectoryOwner,
    StoreLocked,
    close_in_children,
    lock_for,
    locked_error,
    owners_of,
    refers_to,
    unlock_and_close,
)
from deepnvme.files.preallocation import free_bytes, preallocate
from deepnvme.files.regular_files import open_without_waiting
from deepnvme.files.replacing import with_filename
from deepnvme.memory.alignment import padded
from deepnvme.memory.host import map_over, reserve_addresses

from .futures import check_not_owned

DATA_NAME = "deepnvme-store.data"
"""Name of the data file in a store's directory."""
# Bytes. A data file that must grow doubles, within these limits, if that takes at most half of the free space.
_SMALLEST_STEP = 16 << 20
_LARGEST_STEP = 1 << 30


class DataFile:
    """A store's data file in one directory, open and locked.

    The owner of the directory creates the file if it is missing. Readers lock the data file itself and so need only
    permission to read it; while a reader holds the lock, an owner cannot take it. A forked child does not share the lock.

    Space is preallocated in large steps, for two reasons: writes past the end of a file are slow (design, section 4), and a
    full disk is detected before a byte is written.

    Args:
        directory: The directory.
        engine: Opens the file for transfers.
        owner: The object that locks the file, for the errors of other processes.
        read_only: Open the file for reading, with a lock that other readers share.

    Raises:
        StoreLocked: If the lock is taken.
        OSError: If the file cannot be opened.
    """

    def __init__(self, directory: Path, engine: Engine, owner: DirectoryOwner, read_only: bool = False) -> None:
        self.directory = directory
        self.path = directory / DATA_NAME
        self._growing = threading.RLock()  # not the store's lock: a drive that hangs in fallocate blocks only growth
        with with_filename(self.path):
            mode = "r" if read_only else "a+"
            self._file = io.FileIO(
                str(self.path), mode, opener=open_without_waiting
            )  # closes itself, so no lock outlives this object
            try:
                close_in_children(self._file)
                lock_data_file(self._file, owner, read_only, self.path)
                self.capacity = os.fstat(self.descriptor).st_size
                self.file: File = engine.open(str(self.path), "r" if read_only else "rw", whole_pages=True)
            except BaseException:
                with contextlib.suppress(OSError):  # it is closed even if close() fails, and the first error is what matters
                    self._file.close()
                raise

    @property
    def descriptor(self) -> int:
        """The file descriptor, for mappings. These also work after the file was unlinked."""
        return self._file.fileno()

    def grow_to(self, size: int, exactly: bool = False) -> None:
        """Preallocate the file up to ``size`` bytes. Blocks for the drive: do not call it with the store's lock held.

        Args:
            size: Least size of the file in bytes.
            exactly: Preallocate no more than ``size`` bytes.

        Raises:
            OSError: With ENOSPC if there is too little space. The file is left unchanged.
            RuntimeError: In a finalizer or signal handler that has interrupted a call of ``grow_to`` in the same thread.
        """
        check_not_owned(self._growing)
        with self._growing:
            if size <= self.capacity:
                return
            step = min(max(self.capacity, _SMALLEST_STEP), _LARGEST_STEP)
            wanted = padded(size)
            generous = wanted if exactly else padded(self.capacity + step)
            if generous > wanted and generous - self.capacity <= free_bytes(self.descriptor, str(self.directory)) // 2:
                wanted = generous
            remedy = "make room, or use another disk"
            preallocate(self.descriptor, self.capacity, wanted, str(self.directory), remedy)
            self.capacity = wanted

    def trim(self, size: int) -> None:
        """Truncate the file to ``size`` bytes, if it is longer."""
        if size < self.capacity:
            with with_filename(self.path):
                os.ftruncate(self.descriptor, size)
            self.capacity = size

    def remove(self) -> None:
        """Unlink the file, unless its path now names another file. Transfers in progress continue on the unlinked file."""
        with contextlib.suppress(OSError):
            if not self._file.closed and refers_to(self.path, self.descriptor):
                os.unlink(self.path)

    def close(self) -> None:
        """Unlock and close the file. Idempotent. If it raises OSError, the file is closed all the same."""
        try:
            self.file.close()
        finally:
            unlock_and_close(self._file, self.path)


def lock_data_file(file: io.FileIO, owner: DirectoryOwner, read_only: bool, path: Path) -> None:
    """Lock an open data file: shared if ``read_only``, else exclusively. Raises StoreLocked naming its directory."""
    try:
        lock_for(owner, file, fcntl.LOCK_SH if read_only else fcntl.LOCK_EX, path)
    except BlockingIOError:
        holders = owners_of(file)
        if read_only:
            raise locked_error(path.parent, holders[0] if holders else None) from None
        text = "what is here is open for reading in another process; close it there, or choose another directory"
        if holders:
            text = f"what is here is open for reading by {holders[0]}: {holders[0].remedy}, or choose another directory"
        raise StoreLocked(errno.EBUSY, text, str(path.parent)) from None


def remove(directory: Path) -> None:
    """Remove the data file that an earlier owner has left in the directory, if there is one."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(directory / DATA_NAME)


def map_files(parts: Iterable[tuple[DataFile, int, int]], nbytes: int) -> torch.Tensor:
    """Return a uint8 tensor that maps ranges of files, one after the other.

    The mapping is private: a page is copied when it is written to. The mapping is removed with the last view of the tensor,
    and needs no open descriptor.

    Args:
        parts: File, offset and length in bytes of each range. All offsets, and all lengths but the last, are multiples of
            ALIGNMENT.
        nbytes: Bytes of all ranges together.

    Raises:
        OSError: If a file cannot be mapped, or is too short (EBADMSG).
    """
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    memory = reserve_addresses(nbytes)  # the whole range first, so that the parts can lie side by side in it
    place = memory.data_ptr()
    for file, offset, length in parts:
        with with_filename(file.path):
            size = os.fstat(file.descriptor).st_size
            if offset + length > size:  # touching a page past the end of the file would end the process with SIGBUS
                text = f"bytes [{offset}, {offset + length}) are to be mapped, and the file was cut off at byte {size}"
                raise OSError(errno.EBADMSG, text)
            map_over(place, length, mmap.PROT_READ | mmap.PROT_WRITE, 0, file.descriptor, offset)
        place += length
    return memory
