"""A store's file in one of its directories: its space, and the two ways to it."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from deepnvme._preallocation import free_bytes, preallocate
from deepnvme.engine import Engine, File

from .extents import Extents, padded
from .owner import Ownership

DATA_NAME = "deepnvme-store.data"
_SMALLEST_STEP = 16 << 20
_LARGEST_STEP = 1 << 30


class DataFile:
    """Opened, made if missing. The directory's lock is held, and stays so.

    Space is preallocated in large steps: writes past the end of a file are slow (design, section 4), and a disk that is full is
    known before a byte is written.
    """

    def __init__(self, owner: Ownership, engine: Engine, weight: float) -> None:
        self.owner = owner
        self.directory = owner.directory
        self.path = owner.directory / DATA_NAME
        self.weight = weight
        self.extents = Extents()
        self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            self.capacity = os.fstat(self._descriptor).st_size
            self.file: File = engine.open(str(self.path), "rw")
        except BaseException:
            os.close(self._descriptor)
            raise

    @property
    def descriptor(self) -> int:
        """For mappings, which work after the file has lost its name, too."""
        return self._descriptor

    def grow_to(self, size: int) -> None:
        """Have ``size`` bytes preallocated, or more. Raises OSError (ENOSPC) and leaves the file as it was."""
        if size <= self.capacity:
            return
        step = min(max(self.capacity, _SMALLEST_STEP), _LARGEST_STEP)
        wanted, generous = padded(size), padded(self.capacity + step)
        if generous > wanted and generous - self.capacity <= self.free() // 2:
            wanted = generous
        self.allocate(wanted)

    def allocate(self, size: int) -> None:
        """Have ``size`` bytes preallocated, which is more than there are. Raises OSError, and leaves the file as it was then."""
        remedy = "make room, or give this directory a smaller weight or another disk"
        preallocate(self._descriptor, self.capacity, size, str(self.directory), remedy)
        self.capacity = size

    def trim(self, size: int) -> None:
        """Give back what lies past ``size`` bytes."""
        if size < self.capacity:
            os.ftruncate(self._descriptor, size)
            self.capacity = size

    def free(self) -> int:
        """Bytes that the file system has left for this user."""
        return free_bytes(self._descriptor)

    def remove(self) -> None:
        """Unlink it, unless something else has its path by now. Transfers under way go on, into a file without a name."""
        with contextlib.suppress(OSError):
            if os.path.samestat(os.stat(self.path), os.fstat(self._descriptor)):
                os.unlink(self.path)

    def close(self) -> None:
        """Idempotent."""
        self.file.close()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def remove(directory: Path) -> None:
    """Remove the data file that an owner has left in the directory, if there is one."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(directory / DATA_NAME)
