"""A cache of experts in memory, which keeps those that tokens have chosen often and lately."""

from __future__ import annotations

import ctypes
import heapq
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence

import torch

from deepnvme._interrupts import defer_interrupts
from deepnvme.cache.block import Block, State
from deepnvme.cache.block_cache import BlockCache, Use
from deepnvme.streaming.extent_memory import PinnedSlots, ViewsKept

from .expert_reader import ExpertBlock, ExpertReader, explain

HALF_LIFE = 64
"""Tokens after which a use counts half. benchmarks/expert_residents.py compares policies: the hit rate of this one is within 3
points of the best fixed choice of experts while a text keeps its topic, and 3 to 12 points above it where topics change. LRU has
up to 40 points less, S3-FIFO up to 13; shorter half-lives lose more than they gain."""


_BUSY_BYTES = 40 << 20
"""Bytes in transfer that keep a drive busy: two experts of up to 20 MiB. Whether that is faster than 16 MiB is
not settled: of two pairs of runs with experts of 24 MiB, one was 7 % faster, the other 18 % slower. Experts read ahead take the
memory of others: in a simulation with three tenths of the experts in memory, reading all chosen experts of a layer ahead cost
2 points of the hit rate, and a limit of one or two experts 1 point."""


_REMEDY = (
    "somebody keeps tensors over weights of experts, such as autograd for a backward: call the model in torch.no_grad(), or give"
    " a larger memory_budget; a model of transformers keeps none after set_experts_implementation('grouped_mm')"
)


class ExpertCache:
    """Keeps the parts of experts' weights that are used now, and the most useful others, in memory of a given size.

    Not thread-safe.

    Args:
        reader: Reads the parts.
        nbytes: Bytes of memory; at least those of the two largest parts, so that one is read while the other is used.
    """

    def __init__(self, reader: ExpertReader, nbytes: int) -> None:
        # Slots of two sizes leave holes, which cost 1.5 points of the hit rate in a simulation. A BufferPool leaves none, but it
        # pinned new memory for two thirds of the reads.
        self._reader = reader
        self._cache = _CacheByWorth(reader, PinnedSlots(nbytes), busy_bytes=_BUSY_BYTES)
        self._used: ExpertBlock | None = None

    @property
    def seconds_waited(self) -> float:
        """Seconds for which :meth:`weight` has waited."""
        return self._cache.seconds_waited

    def expect(self, blocks: Sequence[ExpertBlock]) -> None:
        """Set the blocks that will be used next, in order, and start reading those that are not in memory. Never blocks."""
        self._cache.expect(map(Use, blocks))

    def weight(self, block: ExpertBlock) -> torch.Tensor:
        """Return the weight in a block. Blocks until it is read. The memory of the weight returned before may be reused.

        Raises:
            OSError: If reading fails. The message names layer, expert and offset; ``filename`` is the file.
            OutOfBuffers: If views of weights keep all memory, or the system has too little. The message says what to do.
        """
        self.end_use()
        self._used = block  # before the use begins: after an interrupt, it may have begun or not
        try:
            self._cache.acquire([block])
        except OSError as error:
            raise explain(error, block.part) from error
        except ViewsKept as error:
            raise ViewsKept(f"{error}: {_REMEDY}") from error
        finally:
            self._reader.record_ended()
        memory = block.memory.buffer
        if not block.moved:
            address = memory.data_ptr()
            with defer_interrupts():  # a second move would shift the bytes again
                ctypes.memmove(address + block.part.place, address + block.part.start, block.part.info.nbytes)
                block.moved = True
        return block.part.view(memory)

    def end_use(self) -> None:
        """End the use of the weight that :meth:`weight` has returned last, also after an interrupt. Never blocks."""
        if self._used is not None:
            self._cache.release([self._used])
            self._used = None

    def close(self) -> None:
        """Release all memory. Waits for reads in flight."""
        self._cache.clear()


def note_uses(blocks: Mapping[ExpertBlock, float], now: int) -> None:
    """Increase the worth of blocks.

    The worth is the binary logarithm of all uses, each counted as 2 ** (the token's number / HALF_LIFE): so worths of different
    times compare without being updated.

    Args:
        blocks: Each with its number of uses; more than 0.
        now: Number of tokens up to these.
    """
    for block, uses in blocks.items():
        new = now / HALF_LIFE + math.log2(uses)
        more, less = max(block.worth, new), min(block.worth, new)
        block.worth = more + math.log2(1 + 2 ** (less - more))


class _CacheByWorth(BlockCache):
    """Drops, of the blocks that nobody expects, the one with the least worth."""

    def __init__(self, reader: ExpertReader, memory: PinnedSlots, busy_bytes: int) -> None:
        super().__init__(reader, memory, busy_bytes=busy_bytes)
        self._candidates: list[tuple[float, int, ExpertBlock]] = []  # a heap; a worth in it is at most that of the block by now
        self._queued: set[Block] = set()  # the blocks in the heap
        self._count = itertools.count()

    def release(self, blocks: Iterable[Block], *, changed: bool = False, write: bool = True) -> None:
        """End a use of each block, which can be dropped from now on."""
        released = list(blocks)
        super().release(released, changed=changed, write=write)
        for block in released:
            self._queue(block)

    def _furthest(self, beyond: int) -> Block | None:
        for _ in range(2):
            while self._candidates:
                worth, _, block = heapq.heappop(self._candidates)
                self._queued.discard(block)
                if not self._droppable(block):
                    continue
                if block.worth <= worth:
                    return block
                self._queue(block)
            for other in filter(self._droppable, self._held):  # those whose use was expected when they were looked at
                self._queue(other)
        return super()._furthest(beyond)

    def _droppable(self, block: Block) -> bool:
        """Return whether a block has memory, and nobody uses or expects it."""
        return block.state is State.CLEAN and block not in self._expected and self._is_idle(block)

    def _queue(self, block: Block) -> None:
        """Add a block to the candidates, unless it is one already."""
        assert isinstance(block, ExpertBlock)
        if block not in self._queued:
            self._queued.add(block)
            heapq.heappush(self._candidates, (block.worth, next(self._count), block))
