"""Unpickle a .pt file without reading its storages: give each storage new memory, and note where in the file its bytes are.

torch.load reads the file through :class:`UnpicklingFile`. That is an ordinary file except for one thing: it does not read the
bytes of a storage, and only notes the address of the memory that torch has allocated for them. Then torch asks the functions in
its registry (``torch.serialization.register_package``) to move the storage to its device. The function registered here is asked
before those for CPU and CUDA. It recognises the storage by its address, and returns new memory in its place, which is filled
after everything is unpickled.

Nothing is mapped: if a page of a mapping cannot be read, because the file was truncated or the drive fails, the process ends.
"""

from __future__ import annotations

import ctypes
import io
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch.serialization import default_restore_location
from torch.serialization import load as torch_load  # deepnvme.load may have replaced torch.load

from deepnvme.memory.host import address_range
from deepnvme.transfer.gather import DIRECT_FROM

from .file_io import Path, Placed, empty_storage, memory_for
from .formats.pt_records import CorruptCheckpoint, PtRecords, read_at, refuse_damaged, wrong_size
from .formats.zip_directory import LOCAL_HEADER, data_of

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer
    from typing_extensions import Self

MapLocation = Any
"""A ``map_location`` of torch.load: None, a device or its name, a mapping of names, or a function."""
_BEFORE_CPU = 5
"""Priority in torch's registry, where the lowest is asked first. torch's own CPU function has 10."""


_loading = threading.local()
"""``file``: a weak reference to the :class:`UnpicklingFile` that this thread unpickles, or None.

The reference is weak because Ctrl-C may end the unpickling before the reference is removed, and must not keep the storages and
the file alive.
"""


class UnpicklingFile(io.RawIOBase):
    """A file object for torch.load that does not read the bytes of storages, and decides where each storage goes.

    A context manager: :meth:`load` is called in its block.

    Args:
        path: The file.
        found: Its directory.
        wanted: Returns whether the storage at an offset gets memory. Other storages get addresses without memory behind them,
            by which they can be told apart.
        fill: Reads storages from the file. Called for storages that are needed at once.
    """

    def __init__(
        self, path: Path, found: PtRecords, wanted: Callable[[int], bool], fill: Callable[[Sequence[Placed]], None]
    ) -> None:
        super().__init__()
        self._outer: weakref.ref[UnpicklingFile] | None = None
        """The file that this thread unpickled before the ``with`` block."""
        self._path = path
        self._found = found
        self._wanted = wanted
        self._fill = fill
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115  closed with this file
        self._size = os.fstat(self._file.fileno()).st_size
        self._position = 0
        self._nbytes = {record.header: record.nbytes for record in found.storages}
        self._next: tuple[int, int] | None = None
        """(offset, bytes) of the data of the storage whose header was read last."""
        self._noted = (0, 0, 0)
        """Of the last storage: the address of the memory that torch allocated, the offset in the file, and the bytes there."""
        self._last: torch.UntypedStorage | None = None
        """The last storage, kept alive so that no other storage can get its address."""
        self._addresses: Any = None
        """A range of addresses as long as the file, for the storages that are not wanted."""
        self.failed: OSError | None = None
        """The first error of a read. Kept because torch's reader would turn it into a RuntimeError."""
        self._unclaimed = 0
        """Number of storages that were not read and that torch has not asked to place."""
        self.placed: list[Placed] = []
        """Storages that are still to be filled, with their offsets."""
        self.filled: dict[int, torch.UntypedStorage] | None = None
        """Storages read in advance, by offset, for code that looks at them while the file is unpickled; or None."""

    @property
    def offsets_missed(self) -> bool:
        """Whether torch used unread storages without asking to place them. If so, the loaded object must not be used."""
        return self._unclaimed != 0

    def load(self, **options: Any) -> Any:
        """Load the file with ``torch.load``.

        Args:
            **options: Arguments of ``torch.load``.

        Raises:
            CorruptCheckpoint: If torch cannot load the file because it is damaged.
            OSError: If the file cannot be read.
            Exception: Anything else that ``torch.load`` raises.
        """
        try:
            return torch_load(self, mmap=False, **options)  # type: ignore[arg-type]
        except Exception as error:
            if self.failed is not None:
                raise self.failed from error
            if "resize storage that is not resizable" in str(error):  # torch has no type of its own for it
                raise CorruptCheckpoint(self._path, "a tensor is larger than its storage") from error
            refuse_damaged(self._path, self._found, error)
            raise

    # Called by torch's reader.

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Set the position and return it, in bytes."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        self._position = base + offset
        return self._position

    def readinto(self, buffer: WriteableBuffer) -> int:
        """Fill the buffer from the file and return the number of bytes, but only note the address for a storage's data.

        An error of a read is kept in ``failed``, and the read returns 0.
        """
        view = memoryview(buffer)
        nbytes = len(view)
        if (self._position, nbytes) == self._next:
            self._unclaimed += 1
            self._last = None
            self._noted = ctypes.addressof(ctypes.c_char.from_buffer(view)), self._position, nbytes
            self._position += nbytes
            return nbytes
        try:
            count = read_at(self._file.fileno(), view, self._position)
        except OSError as error:
            self.failed = self.failed or OSError(error.errno, error.strerror, os.fspath(self._path))
            count = 0
        self._next = self._data_behind(view) if count == LOCAL_HEADER.size else None
        self._position += count
        return count

    def __enter__(self) -> Self:
        self._outer = getattr(_loading, "file", None)
        _loading.file = weakref.ref(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        _loading.file = self._outer
        self.close()

    def close(self) -> None:
        """Close the file and drop the last storage. Idempotent."""
        self._file.close()
        self._last = None
        super().close()

    def _data_behind(self, header: memoryview) -> tuple[int, int] | None:
        """Return (offset, bytes) of the storage whose header has just been read.

        None for any other header, and if the data would end past the end of the file.
        """
        nbytes = self._nbytes.get(self._position, 0)
        if not nbytes or bytes(header[:4]) != b"PK\3\4":
            return None
        offset = data_of(header.tobytes(), self._position)
        return (offset, nbytes) if offset + nbytes <= self._size else None

    # Called for each storage that torch has made.

    def place(self, storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage | None:
        """Return the storage to use in place of one that torch has just made, or None if torch should place it itself.

        Raises:
            CorruptCheckpoint: If the storage's size in the pickle is not that of its record.
        """
        offset = self._offset_of_unread(storage)
        if offset is None:
            return None
        nbytes = storage.nbytes()
        if not self._wanted(offset):
            return self._unread(offset, nbytes)
        if self.filled is not None:
            found = self._read_before(offset, nbytes)
            return found if location == "cpu" else self._moved(found, location)
        if location.startswith("cuda"):
            # An empty storage is moved by torch, to get torch's errors for devices that do not exist.
            made = empty_storage(nbytes, self._moved(empty_storage(0), location).device)
        else:
            own = location == "cpu" and nbytes < DIRECT_FROM  # the memory that torch has allocated is good enough
            made = storage if own else memory_for(nbytes, offset)
            if location != "cpu":
                self._fill([Placed(offset, made)])
                return self._moved(made, location)
        self.placed.append(Placed(offset, made))
        return made

    def located_by(self, function: MapLocation) -> MapLocation:
        """Wrap the caller's ``map_location`` function so that it gets storages with their bytes, read in advance.

        The function is not called for storages that are not wanted.
        """

        def locate(storage: torch.UntypedStorage, location: str) -> Any:
            offset = self._offset_of_unread(storage)
            if offset is not None and not self._wanted(offset):
                return self._unread(offset, storage.nbytes())
            return function(storage if offset is None else self._read_before(offset, storage.nbytes()), location)

        return locate

    def _moved(self, storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage:
        """Return the storage moved to where torch places this location."""
        _loading.file = None  # torch asks all functions in its registry again
        try:
            return default_restore_location(storage, location)  # type: ignore[no-any-return, no-untyped-call]
        finally:
            _loading.file = weakref.ref(self)

    def offset_of(self, storage: torch.UntypedStorage) -> int | None:
        """Return the offset in the file of a storage that was not wanted, or None for any other storage."""
        if self._addresses is None or storage.device.type != "cpu" or not storage.nbytes():
            return None
        inside = storage.data_ptr() - self._addresses.data_ptr()
        return inside if 0 <= inside < self._size else None

    def _offset_of_unread(self, storage: torch.UntypedStorage) -> int | None:
        """Return the offset in the file of a storage that torch has just made without its bytes, or None for any other.

        Raises CorruptCheckpoint if the pickle and the record differ in size: torch makes the storage as large as the pickle
        says, whatever memory is behind it.
        """
        if storage.device.type != "cpu" or not storage.nbytes():
            return None
        address = storage.data_ptr()
        if not address:
            raise CorruptCheckpoint(self._path, f"a storage should have {storage.nbytes()} bytes, and its record has none")
        noted, offset, nbytes = self._noted
        if address != noted:
            return None
        if self._last is None:
            self._unclaimed -= 1
            self._last = storage
        if nbytes != storage.nbytes():
            raise wrong_size(self._path, self._found, offset, storage.nbytes())
        return offset

    def _unread(self, offset: int, nbytes: int) -> torch.UntypedStorage:
        """Return a storage of addresses without memory, which stands for the bytes at this offset."""
        if self._addresses is None:
            self._addresses = address_range(self._size).untyped_storage()
        unread: torch.UntypedStorage = self._addresses[offset : offset + nbytes]
        return unread

    def _read_before(self, offset: int, nbytes: int) -> torch.UntypedStorage:
        """Return the storage that was read in advance from this offset. Raises CorruptCheckpoint if none of this size was."""
        found = (self.filled or {}).get(offset)
        if found is None or found.nbytes() != nbytes:
            raise wrong_size(self._path, self._found, offset, nbytes)
        return found


def unread(path: Path, found: PtRecords) -> UnpicklingFile:
    """Return what unpickles the file without reading any storage: each gets addresses only.

    :meth:`UnpicklingFile.offset_of` tells where in the file each storage is.
    """
    return UnpicklingFile(path, found, lambda offset: False, lambda placed: None)


def _place(storage: Any, location: str) -> torch.UntypedStorage | None:
    """Place a storage of the file that this thread unpickles; None leaves a storage of plain ``torch.load`` to torch."""
    reference: weakref.ref[UnpicklingFile] | None = getattr(_loading, "file", None)
    file = None if reference is None else reference()
    return None if file is None else file.place(storage, location)


# The tag of a storage's location is left to the functions that torch asks after this one.
torch.serialization.register_package(_BEFORE_CPU, lambda storage: None, _place)
