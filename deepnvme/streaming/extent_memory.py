"""Memory for extents: slots of any size within a limit, and separately allocated memory for residents."""

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

VIEW_DROP_WAIT_SECONDS = 0.5
"""Seconds to wait for other threads to drop their last references to the memory of weights."""


class ViewsKept(OutOfBuffers):
    """Tensors that somebody keeps take all the memory of slots."""


class Slots(ABC):
    """Memory for the blocks of a :class:`deepnvme.cache.block_cache.BlockCache`: slots within a limit.

    Resident blocks have memory of their own, which does not count towards the limit.

    Attributes:
        limit: Most bytes of all slots together.
    """

    separate_residents = True

    def __init__(self, nbytes: int) -> None:
        self.limit = nbytes

    @abstractmethod
    def lease(self, nbytes: int, limit: int = 0) -> Memory | None:
        """Return a slot of ``nbytes`` bytes; None if there is no room for it within ``self.limit``.

        If ``limit`` is given, a slot beyond ``self.limit`` is returned if all slots then have at most ``limit`` bytes.
        Never waits. Raises OutOfBuffers if the system has not enough memory.
        """

    @abstractmethod
    def memory(self, nbytes: int) -> torch.Tensor:
        """Return newly allocated memory that is not a slot and does not count towards the limit."""

    def take(self, block: Block) -> Memory | None:
        """Return memory for a block: separate memory for a resident, else a slot. None if there is no room for a slot."""
        return OwnMemory(self.memory(block.nbytes)) if block.resident else self.lease(block.nbytes)

    def grow(self, block: Block, held: Sequence[Memory]) -> Memory:
        """Return a slot for a block beyond the limit, when the blocks in use leave no room for it.

        All slots together may then have as many bytes as the limit (or as ``held`` and this block, if that is more), and those of
        one more such block, for memory that a view keeps. If even that is not enough, waits half a second for other threads and
        the garbage collector to drop views. Raises ViewsKept if they do not, OutOfBuffers if the system has not enough memory.
        """
        deadline = time.monotonic() + VIEW_DROP_WAIT_SECONDS
        limit = max(self.limit, sum(memory.nbytes for memory in held) + block.nbytes) + block.nbytes
        while (slot := self.lease(block.nbytes, limit)) is None:
            if time.monotonic() > deadline:
                raise ViewsKept(f"no memory to read {block.name!r} into: views are kept of all {limit} bytes")
            gc.collect()  # tracebacks keep what they saw, in cycles
            time.sleep(TRANSFER_POLL_SECONDS)
        return slot


class PinnedSlots(Slots):
    """Slots in one allocation of pinned host memory, which is pinned when the first slot is leased. Not thread-safe.

    Args:
        nbytes: Bytes of all slots together.
    """

    def __init__(self, nbytes: int) -> None:
        super().__init__(padded(nbytes))
        self._memory: Any = None
        self._taken: list[_LentRange] = []  # by their place; those with memory of their own come first

    @property
    def in_use(self) -> int:
        """Bytes of slots that are leased, or released while a tensor over their memory still exists."""
        self._take_back()
        return sum(taken.size for taken in self._taken)

    def lease(self, nbytes: int, limit: int = 0) -> PinnedSlot | None:
        """Return a slot of ``nbytes`` bytes; None if there is no room for it within ``self.limit``.

        If ``limit`` is given, a separately pinned slot is returned if all slots then have at most ``limit`` bytes. Waits
        only for pinning. Raises OutOfBuffers if the system has not enough memory.
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
        """Return newly allocated, pageable host memory that is not a slot and does not count towards the limit."""
        return empty_aligned(nbytes)

    def _gap(self, size: int) -> tuple[int, int]:
        """Return (index in ``_taken``, offset in bytes) of the first free range of ``size`` bytes, else of the end."""
        place = 0
        for index, taken in enumerate(self._taken):
            if taken.place - place >= size:
                return index, place
            place = max(place, taken.place + taken.size)
        return len(self._taken), place

    def _take_back(self) -> None:
        """Free the ranges whose tensors are all gone, so that they can be leased again."""
        self._taken = [taken for taken in self._taken if taken.view() is not None]


class _LentRange(NamedTuple):
    """The memory range of a slot. The slot may have been released while a tensor over the range still exists."""

    place: int
    """Offset in the one allocation, in bytes; negative for a separately pinned slot."""
    size: int
    """Bytes, a multiple of a page."""
    view: weakref.ref[memoryview]
    """Weak reference to the memoryview that every tensor over the range keeps alive: while it is alive, the range is in use."""


class PinnedSlot:
    """A leased piece of pinned memory. It is returned when it is released or garbage-collected."""

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
        """Release the slot. Its memory is reused once no tensor over it exists any more. Never blocks."""
        del self._buffer
