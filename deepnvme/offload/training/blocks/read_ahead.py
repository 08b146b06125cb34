"""Which blocks of a training are read ahead of their use, and how many."""

from __future__ import annotations

from deepnvme.cache.block import Block
from deepnvme.cache.block_cache import BlockCache, Use

from .step_order import StepOrder

_MOST_EXPECTED = 32
"""Blocks that are expected at a time: more than fit into memory, mostly, and few enough to list for each use."""


class ScheduledBlocks:
    """A cache of blocks that reads ahead, in the order in which the last step used its blocks.

    Args:
        cache: Has the blocks in memory.
    """

    def __init__(self, cache: BlockCache) -> None:
        self.cache = cache
        self.order = StepOrder()

    def acquire(self, block: Block) -> None:
        """Begin a use. Blocks while the block is read. Raises like :meth:`BlockCache.acquire`."""
        self.order.note(block)
        self.cache.acquire([block], then=self._upcoming(block))

    def create(self, block: Block) -> None:
        """Begin a use of a block with new content. Raises like :meth:`BlockCache.create`."""
        self.order.note(block)
        self.cache.create(block)

    def _upcoming(self, block: Block) -> list[Use]:
        found = []
        for following in self.order.following():
            if following.stored or following.in_memory:
                found.append(Use(following))
                if len(found) == _MOST_EXPECTED:
                    break
        return found
