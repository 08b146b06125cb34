"""Blocks by key; ``csrc/bindings/kvstore_binding.cpp``. :mod:`deepnvme.kvstore` is written on it.

The addresses of jobs are not checked. In a forked child all methods of Job and BlockStore raise RuntimeError.
"""

from collections.abc import Sequence
from typing import Any

from typing_extensions import Buffer

from . import Engine

def rows_of(buffer: Buffer, writable: bool) -> tuple[int, int, int, int]:
    """Return (address, rows, bytes from row to row, bytes of a row) of a buffer, whose rows are along its first dimension.

    Raises ValueError if a row is not contiguous, or the buffer is read-only and has to be writable.
    """

class Job:
    """A put or get that was submitted."""

    @property
    def done(self) -> bool: ...
    def wait(self, seconds: float) -> bool:
        """Wait without the GIL until the job is done. Returns False after ``seconds``. Ctrl-C interrupts the waiting."""
    @property
    def flags(self) -> list[bool]:
        """A flag for each key, once the job is done."""
    @property
    def memory_lost(self) -> bool:
        """Whether the system may use the memory of the blocks for ever."""

class BlockStore:
    """See ``csrc/kvstore/block_store.h``. Reads all records. Thread-safe."""

    def __init__(
        self,
        *,
        engine: Engine,
        paths: list[str],
        block_bytes: int,
        slot_bytes: int,
        records_begin: int,
        blocks_begin: int,
        slots: int,
        read_only: bool,
    ) -> None: ...
    def submit(self, read: bool, keys: Sequence[bytes], addresses: Buffer, lengths: Buffer, event: int) -> Job:
        """Start a job. Its memory must stay allocated until it is done. ``event``: an eventfd, which is duplicated, or -1."""
    def contains(self, keys: Sequence[bytes]) -> list[bool]: ...
    def touch(self, keys: Sequence[bytes]) -> list[bool]: ...
    def pin(self, keys: Sequence[bytes]) -> list[bool]: ...
    def unpin(self, keys: Sequence[bytes]) -> list[bool]: ...
    def remove(self, keys: Sequence[bytes]) -> list[bool]: ...
    def clear(self) -> int: ...
    def refresh(self) -> None: ...
    def close(self) -> None:
        """Finish all jobs, stop the threads, flush the records and close the files. Once."""
    def figures(self) -> dict[str, Any]: ...
