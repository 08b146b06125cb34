"""Storages of a file that is being unpickled: memory of their own, and where in the file their bytes are.

torch reads the file through :class:`StoragePlacement`, an ordinary file but for one thing: the bytes of a storage are not read,
and only the address of the memory that torch has made for them is noted. What then moves the storage to its device is found in a
registry that torch keeps for others to add to (``torch.serialization.register_package``): ours is asked before those of CPU and
CUDA, knows the storage by that address, and gives new memory in its place, to be read into once all is unpickled.

Nothing is mapped: a page of a mapping that cannot be read, because others cut the file off or the drive fails, ends the process.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import mmap
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.serialization import default_restore_location
from torch.serialization import load as torch_load  # torch.load may be deepnvme.load by now

from deepnvme.memory.alignment import PAGE
from deepnvme.memory.host import address_range

from .formats.contents import ArchiveContents, CorruptCheckpoint, read_at, refuse_damaged, wrong_size
from .formats.file_image import DIRECT_FROM
from .formats.zip_directory import data_of
from .formats.zip_layout import LOCAL_HEADER

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

MapLocation = Any
"""None, a device, its name, a mapping of names, or a function: as torch.load takes it."""
_BEFORE_CPU = 5
"""A priority: torch's own CPU has 10, and the lowest is asked first."""


class PlacedStorage(NamedTuple):
    """A storage, and the byte of the file that its first one is to be."""

    offset: int
    storage: torch.UntypedStorage

    @property
    def nbytes(self) -> int:
        return self.storage.nbytes()


class Refusals:
    """What was raised where a storage was to go: by the caller's function or for want of a device, and so not for the file."""

    def __init__(self) -> None:
        self.refused: Exception | None = None
        self._inside = False

    def asking(self, function: MapLocation) -> MapLocation:
        """The caller's function, for torch.load."""

        def locate(storage: torch.UntypedStorage, location: str) -> Any:
            with self.noting():
                return function(storage, location)

        return locate

    def place(self, storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage | None:
        if self._inside:
            return None
        self._inside = True
        try:
            return self.moved(storage, location)
        finally:
            self._inside = False

    def moved(self, storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage:
        """To where torch has it."""
        try:
            return default_restore_location(storage, location)  # type: ignore[no-any-return, no-untyped-call]
        except Exception as error:
            if _is_device(location):
                self.refused = error
            raise

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.refused = error
            raise


def _is_device(location: str) -> bool:
    """Whether it is the name of one that some torch has: anything else comes of a damaged file."""
    try:
        torch.device(location)
    except (RuntimeError, TypeError):
        return False
    return True


class StoragePlacement(io.RawIOBase):
    """A file for torch.load whose storages' bytes are not read, and what is asked for each of them while it is unpickled."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        found: ArchiveContents,
        wanted: Callable[[int], bool],
        fill: Callable[[Sequence[PlacedStorage]], None],
    ) -> None:
        """``wanted``: whether the storage at an offset is to have memory; others get addresses without memory behind them, to be
        told apart by. ``fill``: reads storages that have to be there at once."""
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
        """(address of the memory that torch made for the last storage, its offset in the file, its bytes there)."""
        self._last: torch.UntypedStorage | None = None
        """That storage, kept so that nothing else can have its address."""
        self._addresses: Any = None
        """As many as the file has bytes, for the storages that are not wanted."""
        self.failed: OSError | None = None
        """The first error of a read: raised through torch's reader it would be a RuntimeError."""
        self._refusals = Refusals()
        self._unclaimed = 0
        """Storages left unread that torch has not asked where to place."""
        self.placed: list[PlacedStorage] = []
        self.filled: dict[int, torch.UntypedStorage] | None = None
        """By offset: memory that has been read before, for those that look at it while the file is unpickled."""

    @property
    def blind(self) -> bool:
        """Whether storages stayed unread that torch has used in a way that is not known here: then nothing of what it made is to
        be used."""
        return self._unclaimed != 0

    def load(self, **options: Any) -> Any:
        """``torch.load`` of the file. Raises what that raises; CorruptCheckpoint where the file is the reason; OSError from
        reading."""
        try:
            return torch_load(self, mmap=False, **options)  # type: ignore[arg-type]
        except Exception as error:
            if self.failed is not None:
                raise self.failed from error
            if "resize storage that is not resizable" in str(error):
                raise CorruptCheckpoint(self._path, "a tensor is larger than its storage") from error
            if error is not self._refusals.refused:
                ours = options.keys() <= {"map_location", "pickle_module", "weights_only"}  # others may be what is wrong
                refuse_damaged(self._path, self._found, error, None if ours else False)
            raise

    # What torch's reader calls.

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        self._position = base + offset
        return self._position

    def readinto(self, buffer: WriteableBuffer) -> int:
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

    def close(self) -> None:
        self._file.close()
        self._last = None
        super().close()

    def _data_behind(self, header: memoryview) -> tuple[int, int] | None:
        """(offset, bytes) of a storage whose header has just been read; None for anything else, and where it leads out of the
        file."""
        nbytes = self._nbytes.get(self._position, 0)
        if not nbytes or bytes(header[:4]) != b"PK\3\4":
            return None
        offset = data_of(header.tobytes(), self._position)
        return (offset, nbytes) if offset + nbytes <= self._size else None

    # What torch asks for each storage that it has made.

    def place(self, storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage | None:
        offset = self._offset_of_unread(storage)
        if offset is None:
            return None
        nbytes = storage.nbytes()
        if not self._wanted(offset):
            return self._unread(offset, nbytes)
        if self.filled is not None:
            found = self._read_before(offset, nbytes)
            return found if location == "cpu" else self._refusals.moved(found, location)
        if location.startswith("cuda"):
            # An empty one goes torch's way, with its errors for devices that are not there.
            device = self._refusals.moved(_empty(0), location).device
            with self._refusals.noting():
                made = _empty(nbytes, device)
        else:
            own = location == "cpu" and nbytes < DIRECT_FROM  # the memory that torch has made will do
            made = storage if own else memory_for(nbytes, offset)
            if location != "cpu":
                self._fill([PlacedStorage(offset, made)])
                return self._refusals.moved(made, location)
        self.placed.append(PlacedStorage(offset, made))
        return made

    def located_by(self, function: MapLocation) -> MapLocation:
        """A function for torch.load that gives this one, which the caller wrote, memory that has been read before in place of
        what torch has made; of storages that are not wanted it is not asked."""

        def locate(storage: torch.UntypedStorage, location: str) -> Any:
            offset = self._offset_of_unread(storage)
            if offset is not None and not self._wanted(offset):
                return self._unread(offset, storage.nbytes())
            given = storage if offset is None else self._read_before(offset, storage.nbytes())
            with self._refusals.noting():
                return function(given, location)

        return locate

    def offset_of(self, storage: torch.UntypedStorage) -> int | None:
        """In the file, of a storage that was not wanted; None for any other."""
        if self._addresses is None or storage.device.type != "cpu" or not storage.nbytes():
            return None
        inside = storage.data_ptr() - self._addresses.data_ptr()
        return inside if 0 <= inside < self._size else None

    def _offset_of_unread(self, storage: torch.UntypedStorage) -> int | None:
        """Of one that torch has just made. Raises CorruptCheckpoint where the pickle and the records do not agree: torch makes
        the storage as large as the pickle says, whatever memory is behind it."""
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
        if self._addresses is None:
            self._addresses = address_range(self._size).untyped_storage()
        unread: torch.UntypedStorage = self._addresses[offset : offset + nbytes]
        return unread

    def _read_before(self, offset: int, nbytes: int) -> torch.UntypedStorage:
        found = (self.filled or {}).get(offset)
        if found is None or found.nbytes() != nbytes:
            raise wrong_size(self._path, self._found, offset, nbytes)
        return found


_asked = threading.local()


@contextlib.contextmanager
def placing(
    path: str | os.PathLike[str],
    found: ArchiveContents,
    wanted: Callable[[int], bool],
    fill: Callable[[Sequence[PlacedStorage]], None],
) -> Iterator[StoragePlacement]:
    """While this thread unpickles the file."""
    with StoragePlacement(path, found, wanted, fill) as now, _asking(now):
        yield now


@contextlib.contextmanager
def watching() -> Iterator[Refusals]:
    """While torch loads a file in its own way, by this thread."""
    now = Refusals()
    with _asking(now):
        yield now


@contextlib.contextmanager
def _asking(now: StoragePlacement | Refusals) -> Iterator[None]:
    before = getattr(_asked, "placing", None)
    _asked.placing = now
    try:
        yield
    finally:
        _asked.placing = before


def unread(path: str | os.PathLike[str], found: ArchiveContents) -> contextlib.AbstractContextManager[StoragePlacement]:
    """For an object whose storages are addresses only: :meth:`StoragePlacement.offset_of` says where in the file each is."""
    return placing(path, found, lambda offset: False, lambda placed: None)


def memory_for(nbytes: int, offset: int) -> torch.UntypedStorage:
    """New memory, where a direct transfer from ``offset`` of a file needs no copy: as far behind a page's boundary as that."""
    if nbytes < DIRECT_FROM:
        return _empty(nbytes)
    inside = offset % PAGE
    pages = mmap.mmap(-1, inside + nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8, offset=inside, count=nbytes).untyped_storage()


def _empty(nbytes: int, device: torch.device | str = "cpu") -> torch.UntypedStorage:
    return torch.UntypedStorage(nbytes, device=device)  # type: ignore[no-untyped-call]


def _nobody(storage: Any) -> None:
    """Storages are tagged by their own devices."""


def _place(storage: Any, location: str) -> torch.UntypedStorage | None:
    now: StoragePlacement | Refusals | None = getattr(_asked, "placing", None)
    return None if now is None else now.place(storage, location)


torch.serialization.register_package(_BEFORE_CPU, _nobody, _place)
