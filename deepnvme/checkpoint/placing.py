"""Storages of a file that is being unpickled: memory of their own, and where in the file their bytes are.

torch maps the file (``mmap=True``) and makes each storage a slice of the mapping. What then moves it to its device is found
in a registry that torch keeps for others to add to (``torch.serialization.register_package``): ours is asked before those of
CPU and CUDA, knows a slice by its address, and gives new memory in its place, to be read into once all is unpickled. So
nothing of the file is read through the mapping.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from typing import IO, Any, NamedTuple

import torch
from torch.serialization import default_restore_location

from .contents import CorruptCheckpoint
from .file_image import DIRECT_FROM, PAGE

MapLocation = Any
"""None, a device, its name, a mapping of names, or a function: as torch.load takes it."""
_BEFORE_CPU = 5
"""A priority: torch's own CPU has 10, and the lowest is asked first."""
_NONE = (0, 0, 0)
_ANONYMOUS = (b"00:00", b"0")
"""The device and inode of memory that no file is behind."""


class Placed(NamedTuple):
    """A storage, and the byte of the file that its first one is to be."""

    offset: int
    storage: torch.UntypedStorage

    @property
    def nbytes(self) -> int:
        return self.storage.nbytes()


class Placing:
    """What is asked for every storage of one file, by the thread that unpickles it."""

    def __init__(self, path: str | os.PathLike[str], wanted: Callable[[int], bool]) -> None:
        """``wanted``: whether the storage at an offset is to have memory; others stay slices of the mapping,
        which costs nothing until they are looked at."""
        self._path = path
        self._file = _file_of(path)
        self._wanted = wanted
        self._mapping = _NONE
        self._missed = False
        self.placed: list[Placed] = []
        self.elsewhere: list[Placed] = []
        """Slices of the mapping that torch is to copy to devices that are neither a CPU nor CUDA."""
        self.filled: dict[int, torch.UntypedStorage] | None = None
        """By offset: memory that has been read before, for those that look at it while the file is unpickled."""

    @property
    def blind(self) -> bool:
        """Whether there were storages, and no mapping of the file was found: they may be slices of it all the same."""
        return self._missed and self._mapping is _NONE

    def offset_of(self, storage: torch.UntypedStorage) -> int | None:
        """In the file, of a storage that is a slice of its mapping."""
        address = storage.data_ptr() if storage.device.type == "cpu" and storage.nbytes() else 0
        if not address:
            return None
        begin, end, offset = self._mapping
        if not begin <= address < end:
            found = _mapping_at(address, self._file)
            if found is None:
                self._missed = True
                return None
            begin, end, offset = self._mapping = found
        return address - begin + offset

    def located_by(self, function: MapLocation) -> MapLocation:
        """A function for torch.load that gives this one, which the caller wrote, memory that has been read before in place of
        a slice of the mapping; of storages that are not wanted it is not asked."""

        def locate(storage: torch.UntypedStorage, location: str) -> Any:
            offset = self.offset_of(storage)
            if offset is None:
                return function(storage, location)
            return function(self._read_before(offset, storage), location) if self._wanted(offset) else storage

        return locate

    def place(self, storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage | None:
        offset = self.offset_of(storage)
        if offset is None:
            return None
        if not self._wanted(offset):
            return storage
        if self.filled is not None:
            found = self._read_before(offset, storage)
            return found if location == "cpu" else default_restore_location(found, location)  # type: ignore[no-untyped-call]
        if location == "cpu":
            made = memory_for(storage.nbytes(), offset)
        elif location.startswith("cuda"):
            # An empty one goes torch's way, with its errors for devices that are not there.
            device = default_restore_location(_empty(0), location).device  # type: ignore[no-untyped-call]
            made = _empty(storage.nbytes(), device)
        else:
            self.elsewhere.append(Placed(offset, storage))
            return None
        self.placed.append(Placed(offset, made))
        return made

    def _read_before(self, offset: int, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        """What ``storage`` is to be. Raises CorruptCheckpoint where the pickle and the records do not agree."""
        found = (self.filled or {}).get(offset)
        if found is None or found.nbytes() != storage.nbytes():
            there = 0 if found is None else found.nbytes()
            raise CorruptCheckpoint(self._path, f"storage at byte {offset}: expected {storage.nbytes()} bytes, found {there}")
        return found


_asked = threading.local()


@contextlib.contextmanager
def placing(path: str | os.PathLike[str], wanted: Callable[[int], bool]) -> Iterator[Placing]:
    """While this thread unpickles the file."""
    before = getattr(_asked, "placing", None)
    _asked.placing = Placing(path, wanted)
    try:
        yield _asked.placing
    finally:
        _asked.placing = before


def name_of(file: IO[bytes], path: str | os.PathLike[str]) -> str:
    """Of an open file, for torch.load to map it by: torch maps only what has a name in UTF-8, as the descriptor's link has. Where
    /proc is not mounted it is the path."""
    link = f"/proc/self/fd/{file.fileno()}"
    return link if os.path.exists(link) else os.fspath(path)


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


class _Mapping(NamedTuple):
    begin: int
    """Address."""
    end: int
    offset: int
    """In the file, of the first byte."""
    file: tuple[bytes, bytes]
    """Device and inode."""


def _mapped_at(address: int) -> _Mapping | None:
    with contextlib.suppress(FileNotFoundError), open("/proc/self/maps", "rb") as maps:  # whose names may be of any bytes
        for line in maps:
            bounds, _, offset, device, inode = line.split(maxsplit=5)[:5]
            begin, end = (int(number, 16) for number in bounds.split(b"-"))
            if begin <= address < end:
                return _Mapping(begin, end, int(offset, 16), (device, inode))
    return None  # or nothing is known, where /proc is not mounted


def _file_of(path: str | os.PathLike[str]) -> tuple[bytes, bytes]:
    """As the list of mappings names it: on btrfs and under overlays stat says another device."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 1, access=mmap.ACCESS_COPY) as page:
        address = ctypes.addressof(ctypes.c_char.from_buffer(page))
        found = _mapped_at(address)
    return (b"", b"") if found is None else found.file


def _mapping_at(address: int, file: tuple[bytes, bytes]) -> tuple[int, int, int] | None:
    """(first address, end, offset in the file) of the mapping of this file there."""
    found = _mapped_at(address)
    return found[:3] if found is not None and found.file == file != _ANONYMOUS else None


def _nobody(storage: Any) -> None:
    """Storages are tagged by their own devices."""


def _place(storage: Any, location: str) -> torch.UntypedStorage | None:
    now: Placing | None = getattr(_asked, "placing", None)
    return None if now is None else now.place(storage, location)


torch.serialization.register_package(_BEFORE_CPU, _nobody, _place)
