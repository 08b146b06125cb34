"""Base class of DeepSpeed's file writers, with the path and the statistics."""

from __future__ import annotations

import io
import os
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
        self._stats[key] += incr

    def _wrote(self, nbytes: int, seconds: float) -> None:
        self._incr_stats(constants.WRITE_COUNT_KEY)
        self._incr_stats(constants.WRITE_BYTES_KEY, nbytes)
        self._incr_stats(constants.WRITE_SEC_KEY, seconds)

    def _dump_state(self) -> None:
        """Print the statistics. Called by DeepSpeed's checkpoint writer with ``show_statistics``."""
        self._stats[constants.WRITE_SPEED_KEY] = self._speed(constants.WRITE_BYTES_KEY, constants.WRITE_SEC_KEY)
        self._stats[constants.FILE_PATH_KEY] = self._file_path
        print(f"stats = {self._stats}")

    def _speed(self, bytes_key: str, seconds_key: str) -> float:
        """Return a speed in GiB/s."""
        seconds = self._stats[seconds_key]
        return float(self._stats[bytes_key] / seconds / (1 << 30)) if seconds > 0 else 0.0
