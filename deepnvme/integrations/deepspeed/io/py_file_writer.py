"""A file writer through Python's own file object, as a baseline for the others."""

from __future__ import annotations

import os
import time
from typing import Any

from .base_file_writer import BaseFileWriter


class PyFileWriter(BaseFileWriter):
    """A file object that writes through ``open(file_path, "wb")``. Methods raise OSError.

    Contract: DeepSpeed 0.19, ``io/py_file_writer.py``.
    """

    def __init__(self, file_path: str | os.PathLike[str]) -> None:
        super().__init__(file_path)
        self._fp = open(file_path, "wb")  # noqa: SIM115

    def write(self, buffer: Any) -> int:
        """Write all of ``buffer``, an object with the buffer protocol, and return its length in bytes."""
        began = time.perf_counter()
        nbytes = self._fp.write(buffer)
        self._wrote(nbytes, time.perf_counter() - began)
        return nbytes

    def seekable(self) -> bool:
        """Return True: the file object has :meth:`seek`."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move to another position in the file, and return it in bytes."""
        return self._fp.seek(offset, whence)

    def tell(self) -> int:
        """Return the position in the file, in bytes."""
        return self._fp.tell()

    def flush(self) -> None:
        """Pass what Python has buffered to the kernel."""
        super().flush()
        if hasattr(self, "_fp") and not self._fp.closed:
            self._fp.flush()

    def close(self) -> None:
        """Flush and close the file. Idempotent. The file is not made stable on the drive."""
        try:
            super().close()
        finally:
            if hasattr(self, "_fp"):
                self._fp.close()
