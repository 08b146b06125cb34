"""Memory that extents are read into: slots of any size within a limit, and memory of their own for residents."""

from __future__ import annotations

import gc
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from deepnvme._polling import TRANSFER_POLL_SECONDS
from deepnvme.cache.block import Block, Memory
from deepnvme.cache.block_memory import OwnMemory
from deepnvme.memory.alignment import padded
from deepnvme.memory.host import empty_aligned
from deepnvme.memory.pool import OutOfBuffers, pinned

LINGER_SECONDS = 0.5
"""Seconds that a thread may take to drop its last references to memory of weights."""


class Slots(ABC):
    """Memory for the blocks of a :class:`deepnvme.cache.block_cache.BlockCache`. Residents have memory beside it.

    Attributes:
        limit: Bytes of all slots.
    """

    separate_residents = True

    def __init__(self, nbytes: int) -> None:
        self.limit = nbytes

    @abstractmethod
    def lease(self, nbytes: int, limit: int = 0) -> Memory | None:
        """Return a slot; None if there is no room, and more than ``limit`` bytes would be lent with other memory.

        Never waits. Raises OutOfBuffers if the system has not so much memory.
        """

    @abstractmethod
    def memory(self, nbytes: int) -> torch.Tensor:
        """Return memory beside the slots, for as long as it is wanted."""

    def take(self, block: Block) -> Memory | None:
        """Return memory of its own for a resident block, a slot for another; None if there is no room for it."""
        return OwnMemory(self.memory(block.nbytes)) if block.resident else self.lease(block.nbytes)

    def grow(self, block: Block, held: Sequence[Memory]) -> Memory:
        """Return memory for a block beyond the limit: room for the blocks in use, and for one more that a kept view holds.

        Waits half a second for threads and garbage to drop their views. Raises OutOfBuffers if they do not.
        """
        deadline = time.monotonic() + LINGER_SECONDS
        limit = max(self.limit, sum(memory.nbytes for memory in held) + block.nbytes) + block.nbytes
        while (slot := self.lease(block.nbytes, limit)) is None:
            if time.monotonic() > deadline:
                raise OutOfBuffers(f"no memory to read {block.name!r} into: views are kept of all {limit} bytes")
            gc.collect()  # tracebacks keep what they saw, in cycles
            time.sleep(TRANSFER_POLL_SECONDS)
        return slot


class PinnedSlots(Slots):
    """Slots in one piece of pinned host memory, which is pinned when the first is leased. Not thread-safe.

    Args:
        nbytes: Bytes of all slots together.
    """

    def __init__(self, nbytes: int) -> None:
        super().__init__(padded(nbytes))
        self._memory: Any = None
        self._taken: list[_LentRange] = []  # by their place; those with memory of their own come first

    @property
    def in_use(self) -> int:
        """Bytes of slots that are lent, or that somebody still has a tensor over."""
        self._take_back()
        return sum(taken.size for taken in self._taken)

    def lease(self, nbytes: int, limit: int = 0) -> PinnedSlot | None:
        """Return a slot; None if there is no room, and more than ``limit`` bytes would be lent with memory of its own.

        Waits for nothing but the first pinning. Raises OutOfBuffers if the system has not so much memory.
        """
        self._take_back()
        size = padded(max(nbytes, 1))
        index, place = self._gap(size)
        if place + size <= self.limit:
            if self._memory is None:
                self._memory = pinned(self.limit)
            memory = memoryview(self._memory)[place : place + nbytes]
        elif sum(taken.size for taken in self._taken) + size <= limit:
            memory = memoryview(pinned(size))[:nbytes]
            index, place = 0, -size
        else:
            return None
        self._taken.insert(index, _LentRange(place, size, weakref.ref(memory)))
        return PinnedSlot(memory)

    def memory(self, nbytes: int) -> torch.Tensor:
        """Return memory beside the slots, for as long as it is wanted."""
        return empty_aligned(nbytes)

    def _gap(self, size: int) -> tuple[int, int]:
        """Return the first gap of this size, or the end: the index in ``_taken`` at which it belongs, and its place in bytes."""
        place = 0
        for index, taken in enumerate(self._taken):
            if taken.place - place >= size:
                return index, place
            place = max(place, taken.place + taken.size)
        return len(self._taken), place

    def _take_back(self) -> None:
        """Forget the ranges that no tensor is left over."""
        self._taken = [taken for taken in self._taken if taken.view() is not None]


class _LentRange(NamedTuple):
    """The memory of a slot, which may have been released."""

    place: int
    """Bytes from the beginning of the one piece; less than 0 if it is not in there."""
    size: int
    """Bytes, a multiple of a page."""
    view: weakref.ref[memoryview]
    """The memoryview that every tensor over the memory keeps alive: while there is one, the memory is in use."""


class PinnedSlot:
    """Pinned memory on loan, until it is released or dropped."""

    def __init__(self, memory: memoryview) -> None:
        self.nbytes = memory.nbytes
        with torch.inference_mode(False):  # what is made in that mode cannot be written to outside of it
            self._buffer = torch.frombuffer(memory, dtype=torch.uint8) if memory.nbytes else torch.empty(0, dtype=torch.uint8)

    @property
    def buffer(self) -> torch.Tensor:
        """The memory as a one-dimensional uint8 tensor. Raises ValueError after release."""
        if not hasattr(self, "_buffer"):
            raise ValueError("the slot was released: use its buffer before")
        return self._buffer

    def release(self) -> None:
        """Give the memory back, as soon as no tensor over it is left. Never blocks."""
        del self._buffer
