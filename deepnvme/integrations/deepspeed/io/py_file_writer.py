"""A writer through Python's own file object, to compare the others with."""

from __future__ import annotations

import os
import time
from typing import Any

from .base_file_writer import BaseFileWriter


class PyFileWriter(BaseFileWriter):
    """Opens ``file_path`` for writing, empty. Contract: DeepSpeed 0.19, ``io/py_file_writer.py``. Raises OSError."""

    def __init__(self, file_path: str | os.PathLike[str]) -> None:
        super().__init__(file_path)
        self._fp = open(file_path, "wb")  # noqa: SIM115

    def write(self, buffer: Any) -> int:
        """Take all of ``buffer``, anything with the buffer protocol, and return its length in bytes."""
        began = time.perf_counter()
        nbytes = self._fp.write(buffer)
        self._wrote(nbytes, time.perf_counter() - began)
        return nbytes

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        return self._fp.seek(offset, whence)

    def tell(self) -> int:
        return self._fp.tell()

    def flush(self) -> None:
        super().flush()
        if hasattr(self, "_fp") and not self._fp.closed:
            self._fp.flush()

    def close(self) -> None:
        try:
            super().close()
        finally:
            if hasattr(self, "_fp"):
                self._fp.close()
