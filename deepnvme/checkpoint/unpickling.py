"""Unpickle a .pt file without reading its storages: the caller provides the memory of each, and fills it afterwards.

Nothing is mapped: if a page of a mapping cannot be read, because the file was truncated or the drive fails, the process ends.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from deepnvme.memory.host import address_range

from .file_io import Path, empty_storage
from .formats.pt_pickle import Place, unpickled
from .formats.pt_records import CorruptCheckpoint, StoragePlaces

MapLocation = Any
"""A ``map_location`` of torch.load: None, a device or its name, a mapping of names, or a function."""


def unpickle(path: Path, stream: bytes, place: Place, weights_only: bool, **options: Any) -> Any:
    """Return the object of a file's pickle. The arguments are those of :func:`unpickled`, after the path for errors.

    Raises:
        CorruptCheckpoint: If a tensor is larger than its storage.
        Exception: Whatever unpickling or ``place`` raises.
    """
    try:
        return unpickled(stream, place, weights_only, **options)
    except RuntimeError as error:
        if "resize storage that is not resizable" in str(error):  # torch has no type of its own for it
            raise CorruptCheckpoint(path, "a tensor is larger than its storage") from error
        raise


class UnreadStorages:
    """Storages that take up addresses but no memory, and by whose addresses their bytes in the file are found.

    Args:
        path: The file.
        storages: Where its storages are.
    """

    def __init__(self, path: Path, storages: StoragePlaces) -> None:
        self._storages = storages
        self._size = os.path.getsize(path)
        self._addresses: Any = address_range(self._size).untyped_storage()

    def place(self, key: str, nbytes: int, location: str) -> torch.UntypedStorage:
        """Return a storage for a key of the pickle; see :func:`unpickled`."""
        _, offset = self._storages.place(key, nbytes)
        unread: torch.UntypedStorage = self._addresses[offset : offset + nbytes] if nbytes else empty_storage(0)
        return unread

    def offset_of(self, storage: torch.UntypedStorage) -> int | None:
        """Return the offset in the file of one of these storages, or None for any other."""
        if storage.device.type != "cpu" or not storage.nbytes():
            return None
        inside = storage.data_ptr() - self._addresses.data_ptr()
        return inside if 0 <= inside < self._size else None
