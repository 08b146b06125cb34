"""Appending many small pieces to a file in few large writes."""

from __future__ import annotations

from pathlib import Path

import torch

from deepnvme.engine import Engine, File
from deepnvme.memory.tensor_bytes import memory_of

from .gather import CHUNK, Transfers

_CHUNKS = 3
"""One is filled while the others are written."""


class AppendedFile:
    """A new file, to which bytes are appended through chunks of pinned memory. Not thread-safe.

    Bytes that were flushed are never written again, if the file was then padded to the drive's sectors.

    Args:
        engine: Engine that does the writes.
        path: The file. Only this object may write to it.

    Raises:
        OSError: If the file exists already, or cannot be created.
    """

    def __init__(self, engine: Engine, path: Path) -> None:
        self._engine, self.path = engine, path
        self.file: File = engine.open(path, "x+", whole_sectors=True)
        self.position = 0
        """Bytes appended so far, and offset of the next byte."""
        self._written = 0  # writes of all bytes before were started
        self._writes = Transfers()
        self._ring = engine.empty_pinned(_CHUNKS * CHUNK, torch.uint8)
        self._memory = memory_of(self._ring)

    def append(self, data: bytes | bytearray) -> None:
        """Append bytes. Blocks while all chunks are being written. Raises OSError of earlier writes."""
        left = memoryview(data)
        while left:
            start, count = self.position % len(self._ring), min(CHUNK - self.position % CHUNK, len(left))
            self._memory[start : start + count] = left[:count]
            left = left[count:]
            self.position += count
            if self.position % CHUNK == 0:
                self._write()
                self._writes.take_ended(most=_CHUNKS - 1)

    def pad(self, alignment: int) -> int:
        """Append zeros up to a multiple of ``alignment``, and return how many."""
        gap = -self.position % alignment
        self.append(bytes(gap))
        return gap

    def _write(self) -> None:
        """Start writing the bytes of the present chunk that are not written yet."""
        start, count = self._written % len(self._ring), self.position - self._written
        if count:
            self._writes.start(self._engine.write, self._ring[start : start + count], self.file, self._written)
            self._written = self.position

    def flush(self) -> None:
        """Write everything to stable storage. Blocks. Raises OSError."""
        self._write()
        self._writes.result()
        self._engine.fsync(self.file).result()
