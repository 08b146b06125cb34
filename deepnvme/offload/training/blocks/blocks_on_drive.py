"""The store of a training's blocks, their memory, and in which order blocks are read ahead of their use."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

from deepnvme.cache.block import Block, Memory
from deepnvme.cache.block_cache import BlockCache, Use
from deepnvme.cache.block_memory import OwnMemory
from deepnvme.drives.aio_config import AioConfig
from deepnvme.drives.profiles import engine_for
from deepnvme.files.directory_lock import DirectoryOwner
from deepnvme.offload.pinned_arena import PinnedArena
from deepnvme.states.counted_io import CountedIO
from deepnvme.states.sub_group import SubGroup
from deepnvme.states.versions import BlockVersions
from deepnvme.store.own_directory import open_own_store, remove_directories

_PREFIX = "deepnvme-training"
_MOST_EXPECTED = 32
"""Blocks that are expected at a time: more than fit into memory, mostly, and few enough to list for each use."""


class BlocksOnDrive:
    """A store for blocks, and the cache that keeps blocks in memory.

    The cache reads ahead the blocks that followed in the last step, and after these the blocks that the next step begins with.

    Args:
        paths: Directories. The store makes a new directory in each.
        aio_config: Settings of the engine; None for the profile of the drive.
        owner: The training.
        limit: Most bytes of blocks in memory. Only a block that is needed immediately may exceed it.

    Raises:
        OSError: From creating and opening files.
    """

    def __init__(self, paths: Sequence[Path], aio_config: AioConfig | None, owner: DirectoryOwner, limit: int) -> None:
        self._engine = engine_for(list(paths), aio_config)
        try:
            self.store, self.directories = open_own_store(paths, _PREFIX, self._engine, owner, collect=True)
        except BaseException:
            self._engine.close()
            raise
        self.io = CountedIO(self.store)
        self.versions = BlockVersions(self.store)
        """Chooses where on the drive a step writes."""
        memory = ArenaMemory(limit, self.io.record_ended)
        self.cache = BlockCache(self.io, memory, helper=_PREFIX, leased=self.io.leased)
        self._last_step: list[Block] = []  # its uses, in order
        self._this_step: list[Block] = []
        self._place = 0  # in the last step, after the use that the newest one corresponds to

    def close(self) -> None:
        """Close the store and remove its files. An OSError is raised after all the rest is done."""
        with contextlib.ExitStack() as ending:  # from the last to the first, whether or not one of them raises
            ending.callback(remove_directories, self.directories)
            ending.callback(self._engine.close)
            ending.callback(self.store.close)

    def begin_step(self) -> None:
        """Begin a step. Earlier transfers, such as those of an evaluation, are not counted for the step."""
        self.io.finish()
        self.io.times.begin()
        if self._this_step:
            self._last_step = self._this_step
        self._this_step, self._place = [], 0

    def acquire(self, block: Block) -> None:
        """Begin a use. Blocks while the block is read. Raises like :meth:`BlockCache.acquire`."""
        self._record_use(block)
        self.cache.acquire([block], then=self._upcoming())

    def create(self, block: Block) -> None:
        """Give a block memory for new content, without reading the old content. The block keeps it until it is released.

        Raises like :meth:`BlockCache.create`.
        """
        self._record_use(block)
        self.cache.create(block)

    def memory_bytes(self, sub_group: SubGroup) -> int:
        """Return 1: blocks of any size are parts of one region."""
        return 1

    def _record_use(self, block: Block) -> None:
        """Record a use of a block, and update the expected uses if the last step had this use."""
        self._this_step.append(block)
        for place in range(self._place, len(self._last_step)):
            if self._last_step[place] is block:
                self._place = place + 1
                return

    def _upcoming(self) -> list[Use]:
        following = dict.fromkeys([*self._last_step[self._place :], *self._last_step[: self._place]])
        known = (Use(block) for block in following if block.stored or block.in_memory)
        return list(itertools.islice(known, _MOST_EXPECTED))


class ArenaMemory:
    """Lends parts of one pinned region, of any size. Only a block that is needed immediately and does not fit gets other memory.

    A buffer pool would take twice the memory: it would keep chunks of the sizes of parameters, for forwards, and others of the
    sizes of states, for backwards.

    Args:
        nbytes: Bytes of the region.
        drop_ended: Drops transfers that have ended; they keep the memory of dropped blocks.
    """

    separate_residents = False

    def __init__(self, nbytes: int, drop_ended: Callable[[], None]) -> None:
        self._arena, self._drop_ended = PinnedArena(nbytes), drop_ended
        self.limit = self._arena.nbytes
        """Most bytes of blocks: the bytes of the region."""

    def take(self, block: Block) -> Memory | None:
        """Return a part of the region, or None if there is no room. Never waits. Raises OutOfBuffers like :meth:`grow`."""
        lent = self._arena.lend(block.nbytes)
        if lent is None:
            self._drop_ended()
            lent = self._arena.lend(block.nbytes)
        return None if lent is None else OwnMemory(lent)

    def grow(self, block: Block, held: Sequence[Memory]) -> Memory:
        """Return new pinned memory for ``block``, outside of the arena. ``held`` is not used.

        Raises OutOfBuffers if the system cannot pin that much.
        """
        return OwnMemory(self._arena.lend_beyond(block.nbytes))
