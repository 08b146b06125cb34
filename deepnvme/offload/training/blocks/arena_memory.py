"""Memory of a training's blocks: one pinned region, which their sizes may divide in any way."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from deepnvme.cache.block import Block, Memory
from deepnvme.cache.block_memory import OwnMemory
from deepnvme.memory.alignment import padded
from deepnvme.memory.pool import OutOfBuffers
from deepnvme.offload.pinned_arena import PinnedArena


class ArenaMemory:
    """Parts of one region. Only what must be in memory at a time, and finds no room there, has memory of its own.

    A pool would keep chunks of each size: parameters in a forward, states in a backward, and take as much again.

    Args:
        nbytes: Bytes of the region.
        drop_ended: Drops transfers that have ended, which keep the memory of blocks that are gone.
    """

    separate_residents = False

    def __init__(self, nbytes: int, drop_ended: Callable[[], None]) -> None:
        self._arena, self._drop_ended = PinnedArena(nbytes), drop_ended
        self.limit = self._arena.nbytes
        """Bytes of blocks."""

    def take(self, block: Block) -> Memory | None:
        """Return a part of the region, or None if there is no room. Never waits. Raises OutOfBuffers like :meth:`grow`."""
        lent = self._arena.lend(block.nbytes)
        if lent is None:
            self._drop_ended()
            lent = self._arena.lend(block.nbytes)
        return None if lent is None else OwnMemory(lent)

    def grow(self, block: Block, held: Sequence[Memory]) -> Memory:
        """Return memory beside the region. Raises OutOfBuffers if the system has not so much to pin."""
        lent = PinnedArena(padded(block.nbytes)).lend(block.nbytes)
        if lent is None:
            raise OutOfBuffers(f"{block.name} needs {block.nbytes} bytes")
        return OwnMemory(lent)
