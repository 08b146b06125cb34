"""DeepSpeed's file writers: the base class with the statistics, one through Python's file object, one that writes nothing."""

from __future__ import annotations

import io
import os
import time
from collections.abc import Sequence
from typing import Any

from . import constants

_COUNTED = (
    constants.CLOSE_COUNT_KEY,
    constants.FILENO_COUNT_KEY,
    constants.FLUSH_COUNT_KEY,
    constants.WRITE_COUNT_KEY,
    constants.WRITE_BYTES_KEY,
    constants.WRITE_SEC_KEY,
    constants.WRITE_SPEED_KEY,
)


class BaseFileWriter(io.RawIOBase):
    """A file object to write to, which counts what is written. Closed as a context manager and when it is dropped.

    Contract: DeepSpeed 0.19, ``io/base_file_writer.py``, including ``_dump_state`` and the keys of ``_stats``.
    """

    def __init__(self, file_path: str | os.PathLike[str]) -> None:
        super().__init__()
        self._file_path = file_path
        self._stats: dict[str, Any] = dict.fromkeys(_COUNTED, 0)

    def file_path(self) -> str | os.PathLike[str]:
        """Return the path as it was given."""
        return self._file_path

    def writable(self) -> bool:
        """Return True: the file object can be written to."""
        return True

    def fileno(self) -> int:
        """Return -1, as DeepSpeed's writers do: with a real one, torch's older format would bypass this object."""
        self._incr_stats(constants.FILENO_COUNT_KEY)
        return constants.INVALID_FD

    def flush(self) -> None:
        """Count a flush. Has no effect after :meth:`close`."""
        if not self.closed:
            self._incr_stats(constants.FLUSH_COUNT_KEY)

    def close(self) -> None:
        """Close the file, and count that. Idempotent."""
        if not self.closed:
            self._incr_stats(constants.CLOSE_COUNT_KEY)
            flushes = self._stats[constants.FLUSH_COUNT_KEY]
            try:
                super().close()
            finally:
                self._stats[constants.FLUSH_COUNT_KEY] = flushes  # without the flush that io.RawIOBase.close makes

    def _incr_stats(self, key: str, incr: float = 1) -> None:
        """Add to one of the statistics, whose keys are those of the constants."""
        self._stats[key] += incr

    def _wrote(self, nbytes: int, seconds: float) -> None:
        """Count a call that has written ``nbytes`` bytes."""
        self._incr_stats(constants.WRITE_COUNT_KEY)
        self._incr_stats(constants.WRITE_BYTES_KEY, nbytes)
        self._incr_stats(constants.WRITE_SEC_KEY, seconds)

    def _dump_state(self) -> None:
        """Print the statistics. Called by DeepSpeed's checkpoint writer with ``show_statistics``."""
        self._stats[constants.WRITE_SPEED_KEY] = self._speed(constants.WRITE_BYTES_KEY, constants.WRITE_SEC_KEY)
        self._stats[constants.FILE_PATH_KEY] = self._file_path
        print(f"stats = {self._stats}")

    def _speed(self, bytes_key: str, seconds_key: str) -> float:
        """Return bytes per second in GiB/s, of two entries of the statistics; 0 if it took no time."""
        seconds = self._stats[seconds_key]
        return float(self._stats[bytes_key] / seconds / (1 << 30)) if seconds > 0 else 0.0


class PyFileWriter(BaseFileWriter):
    """A file object that writes through ``open(file_path, "wb")``, as a baseline for the others. Methods raise OSError.

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


class MockFileWriter(BaseFileWriter):
    """A file object that counts the bytes it is given and drops them, to measure everything but the writing.

    ``file_path`` is created, or emptied.

    Contract: DeepSpeed 0.19, ``io/mock_file_writer.py``.
    """

    def __init__(self, file_path: str | os.PathLike[str]) -> None:
        super().__init__(file_path)
        self._stats |= {constants.SAVE_STORAGE_KEY: 0, constants.SAVE_STORAGE_BYTES_KEY: 0}
        self._position = 0
        open(file_path, "wb").close()

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
            self._incr_stats(constants.SAVE_STORAGE_KEY)
            self._incr_stats(constants.SAVE_STORAGE_BYTES_KEY, storage.nbytes())
            if save_size:
                written += self._count(constants.STORAGE_OBJ_SIZE)
            written += self._count(storage.nbytes())
        return written

    def _count(self, nbytes: int) -> int:
        """Count bytes as written without writing them, and return their number."""
        self._position += nbytes
        self._wrote(nbytes, 0)
        return nbytes
