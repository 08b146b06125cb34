"""A file writer that writes nothing, to measure everything but the writing."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from .base_file_writer import BaseFileWriter
from .constants import SAVE_STORAGE_BYTES_KEY, SAVE_STORAGE_KEY, STORAGE_OBJ_SIZE


class MockFileWriter(BaseFileWriter):
    """A file object that counts the bytes it is given and drops them. ``file_path`` is created, or emptied.

    Contract: DeepSpeed 0.19, ``io/mock_file_writer.py``.
    """

    def __init__(self, file_path: str | os.PathLike[str]) -> None:
        super().__init__(file_path)
        self._stats |= {SAVE_STORAGE_KEY: 0, SAVE_STORAGE_BYTES_KEY: 0}
        self._position = 0
        with open(file_path, "wb"):
            pass

    def write(self, buffer: Any) -> int:
        """Count the bytes of ``buffer``, an object with the buffer protocol, and return their number."""
        with memoryview(buffer) as view:
            return self._count(view.nbytes)

    def tell(self) -> int:
        """Return the number of bytes counted so far."""
        return self._position

    def save_torch_storage_object_list(self, storage_obj_list: Sequence[tuple[Any, Any]], save_size: bool) -> int:
        """Count the bytes that :meth:`FastFileWriter.save_torch_storage_object_list` of a single writer would write.

        Returns their number.
        """
        written = 0
        for storage, _ in storage_obj_list:
            self._incr_stats(SAVE_STORAGE_KEY)
            self._incr_stats(SAVE_STORAGE_BYTES_KEY, storage.nbytes())
            if save_size:
                written += self._count(STORAGE_OBJ_SIZE)
            written += self._count(storage.nbytes())
        return written

    def _count(self, nbytes: int) -> int:
        self._position += nbytes
        self._wrote(nbytes, 0)
        return nbytes
