"""A block of bytes that is on a drive, in memory, or on its way between the two."""

from __future__ import annotations

import enum
from typing import Protocol

import torch


class Memory(Protocol):
    """Memory that a block has on loan: :class:`deepnvme.memory.lease.Lease` and the like."""

    nbytes: int

    @property
    def buffer(self) -> torch.Tensor:
        """The memory as a one-dimensional uint8 tensor. Raises ValueError after release."""

    def release(self) -> None:
        """Give the memory back. Never blocks."""


class State(enum.Enum):
    """Where the newest bytes of a block are, and what is being transferred."""

    ABSENT = "absent"
    """The block has no memory. Its bytes are on the drive, or nowhere."""
    READING = "reading"
    """Its memory is being filled from the drive."""
    CLEAN = "clean"
    """Memory and drive have the same bytes."""
    DIRTY = "dirty"
    """The memory has newer bytes than the drive."""
    WRITING = "writing"
    """The memory, which has the newest bytes, is being written to the drive."""


class Block:
    """Bytes that are used in memory, and are on a drive otherwise.

    Only its :class:`BlockCache` changes a block: the state through the methods below, each of which is one transition between
    states and raises RuntimeError in any other state; and whether somebody uses the block, whether it stays in memory and whether
    the drive has its bytes, which are independent of the state.

    Args:
        name: Identifies the block: a path, or a name in a store.
        nbytes: Bytes of memory that it needs.
        stored: Whether the drive has its bytes already.
    """

    __slots__ = ("_memory", "error", "name", "nbytes", "resident", "state", "stored", "users")

    def __init__(self, name: str, nbytes: int, stored: bool = False) -> None:
        self.name = name
        self.nbytes = nbytes
        self.stored = stored
        """Whether the drive has bytes of this block, even if outdated ones."""
        self.state = State.ABSENT
        self.users = 0
        """Number of uses that have begun and not ended. Meanwhile the memory stays, and nothing is transferred."""
        self.resident = False
        """Whether the block stays in memory between uses."""
        self.error: BaseException | None = None
        """The error that its last read ended with, until that is raised or the block is read again."""
        self._memory: Memory | None = None

    @property
    def memory(self) -> Memory:
        """The block's memory. Raises RuntimeError if it has none."""
        if self._memory is None:
            raise RuntimeError(f"{self!r} is not in memory: acquire or create it before")
        return self._memory

    @property
    def in_memory(self) -> bool:
        """Whether it has memory, possibly one that is still being read into."""
        return self._memory is not None

    def create(self, memory: Memory) -> None:
        """ABSENT -> DIRTY: the block has memory, whose content is new."""
        self._move(State.ABSENT, to=State.DIRTY)
        self._memory, self.error = memory, None

    def start_reading(self, memory: Memory) -> None:
        """ABSENT -> READING: its bytes are being read into this memory."""
        self._move(State.ABSENT, to=State.READING)
        self._memory, self.error = memory, None

    def read(self) -> None:
        """READING -> CLEAN: its bytes are in memory."""
        self._move(State.READING, to=State.CLEAN)

    def fail_reading(self, error: BaseException) -> Memory:
        """READING -> ABSENT: reading has ended with an error. Returns the memory."""
        self._move(State.READING, to=State.ABSENT)
        self.error = error
        return self._taken()

    def change(self) -> None:
        """CLEAN, DIRTY -> DIRTY: its user has changed the memory."""
        self._move(State.CLEAN, State.DIRTY, to=State.DIRTY)

    def start_writing(self) -> None:
        """DIRTY -> WRITING: its memory is being written."""
        self._move(State.DIRTY, to=State.WRITING)

    def written(self) -> None:
        """WRITING -> CLEAN: the drive has its newest bytes."""
        self._move(State.WRITING, to=State.CLEAN)
        self.stored = True

    def fail_writing(self) -> None:
        """WRITING -> DIRTY: writing has failed; the newest bytes are in memory only."""
        self._move(State.WRITING, to=State.DIRTY)

    def drop(self) -> Memory:
        """CLEAN, DIRTY -> ABSENT: the block has no memory any more. Returns it."""
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
