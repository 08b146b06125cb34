"""A writer that writes nothing, to measure all else."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from .base_file_writer import BaseFileWriter
from .constants import SAVE_STORAGE_BYTES_KEY, SAVE_STORAGE_KEY, STORAGE_OBJ_SIZE


class MockFileWriter(BaseFileWriter):
    """Makes ``file_path`` an empty file and counts what it is given. Contract: DeepSpeed 0.19, ``io/mock_file_writer.py``."""

    def __init__(self, file_path: str | os.PathLike[str]) -> None:
        super().__init__(file_path)
        self._stats |= {SAVE_STORAGE_KEY: 0, SAVE_STORAGE_BYTES_KEY: 0}
        self._position = 0
        with open(file_path, "wb"):
            pass

    def write(self, buffer: Any) -> int:
        """The length of ``buffer`` in bytes."""
        with memoryview(buffer) as view:
            return self._count(view.nbytes)

    def tell(self) -> int:
        return self._position

    def save_torch_storage_object_list(self, storage_obj_list: Sequence[tuple[Any, Any]], save_size: bool) -> int:
        """As :meth:`FastFileWriter.save_torch_storage_object_list`, of one writer: the bytes that it would write."""
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
