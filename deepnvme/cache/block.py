"""A block of bytes that is on a drive, in memory, or in transfer between the two; and the states it can be in."""

from __future__ import annotations

import enum
from typing import Protocol

import torch


class Memory(Protocol):
    """Memory that is lent to a block, such as a :class:`deepnvme.memory.lease.Lease`."""

    nbytes: int

    @property
    def buffer(self) -> torch.Tensor:
        """The memory as a one-dimensional uint8 tensor. Raises ValueError after release."""

    def release(self) -> None:
        """Give the memory back. Never blocks."""


class State(enum.Enum):
    """Where the newest bytes of a block are, and what is being transferred."""

    ABSENT = "absent"
    """The block has no memory. Its bytes are on the drive, or it has no content yet."""
    READING = "reading"
    """The block's memory is being filled from the drive."""
    CLEAN = "clean"
    """Memory and drive have the same bytes."""
    DIRTY = "dirty"
    """The memory has newer bytes than the drive."""
    WRITING = "writing"
    """The block's memory, which has the newest bytes, is being written to the drive."""


class Block:
    """A block of bytes that is in memory while it is used, and otherwise on a drive.

    Only the block's :class:`BlockCache` changes it. The methods below change the state: each is one transition, and raises
    RuntimeError in any other state. Independent of the state are ``users`` (the uses in progress), ``resident`` (whether the
    block stays in memory between uses) and ``stored`` (whether the drive has bytes of the block).

    Args:
        name: Identifies the block: a path, or a name in a store.
        nbytes: Bytes of memory that the block needs.
        stored: Whether the drive already has bytes of the block.
    """

    __slots__ = ("_memory", "error", "name", "nbytes", "resident", "state", "stored", "users")

    def __init__(self, name: str, nbytes: int, stored: bool = False) -> None:
        self.name = name
        self.nbytes = nbytes
        self.stored = stored
        """Whether the drive has bytes of this block, even if outdated ones."""
        self.state = State.ABSENT
        self.users = 0
        """Number of uses that have begun and not ended. While it is not 0, the block keeps its memory and is not transferred."""
        self.resident = False
        """Whether the block stays in memory between uses."""
        self.error: BaseException | None = None
        """Error of the block's last read, until it is raised or the block is read again. None if there is none."""
        self._memory: Memory | None = None

    @property
    def memory(self) -> Memory:
        """The block's memory. Raises RuntimeError if it has none."""
        if self._memory is None:
            raise RuntimeError(f"{self!r} is not in memory: acquire or create it before")
        return self._memory

    @property
    def in_memory(self) -> bool:
        """Whether the block has memory, even if a read into the memory has not ended."""
        return self._memory is not None

    def create(self, memory: Memory) -> None:
        """ABSENT -> DIRTY: the block gets memory for new content."""
        self._move(State.ABSENT, to=State.DIRTY)
        self._memory, self.error = memory, None

    def start_reading(self, memory: Memory) -> None:
        """ABSENT -> READING: the block gets memory, and its bytes are being read into it."""
        self._move(State.ABSENT, to=State.READING)
        self._memory, self.error = memory, None

    def read(self) -> None:
        """READING -> CLEAN: the read has succeeded; the block's bytes are in memory."""
        self._move(State.READING, to=State.CLEAN)

    def fail_reading(self, error: BaseException) -> Memory:
        """READING -> ABSENT: the read has failed with ``error``. Return the memory, which the block no longer uses."""
        self._move(State.READING, to=State.ABSENT)
        self.error = error
        return self._taken()

    def change(self) -> None:
        """CLEAN, DIRTY -> DIRTY: the user of the block has changed its memory."""
        self._move(State.CLEAN, State.DIRTY, to=State.DIRTY)

    def start_writing(self) -> None:
        """DIRTY -> WRITING: the block's memory is being written to the drive."""
        self._move(State.DIRTY, to=State.WRITING)

    def written(self) -> None:
        """WRITING -> CLEAN: the write has succeeded; the drive has the block's newest bytes."""
        self._move(State.WRITING, to=State.CLEAN)
        self.stored = True

    def fail_writing(self) -> None:
        """WRITING -> DIRTY: writing has failed; the newest bytes are in memory only."""
        self._move(State.WRITING, to=State.DIRTY)

    def drop(self) -> Memory:
        """CLEAN, DIRTY -> ABSENT: the block loses its memory. Return the memory."""
        self._move(State.CLEAN, State.DIRTY, to=State.ABSENT)
        return self._taken()

    def _move(self, *before: State, to: State) -> None:
        if self.state not in before:
            raise RuntimeError(f"{self!r} cannot become {to.value}")
        self.state = to

    def _taken(self) -> Memory:
        memory, self._memory = self.memory, None
        return memory

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}: {self.nbytes} bytes, {self.state.value}>"
