"""A cache of weight extents in memory, which reads extents before their use, as far ahead as there is room."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

import torch

from deepnvme.cache.block import Block, State
from deepnvme.cache.block_cache import BlockCache, Use
from deepnvme.memory.lease import Transfer

from .extent_memory import Slots


class ExtentCache:
    """Keeps extents in memory while they are used, and reads expected extents ahead.

    - A use of an extent lasts from :meth:`acquire` to :meth:`release`; its memory does not change meanwhile. Uses may
      overlap: an extent is in memory once, however many uses it has.
    - Extents are read ahead as far as there is room beside those in use. If the extents in use need no room, as much room
      as the first expected extent needs is left free. So a wrong prediction seldom causes a wait.
    - Memory of a released extent is not reused while a view of it exists. Until then, the cache has less memory.
    - If the extents in use need more memory than the slots have, additional memory is allocated until they are released.
    - A failed read raises its error only in :meth:`acquire`, and only if acquire() started it. An extent whose read-ahead
      failed is read again when it is acquired, since the cause may have been removed by then.
    - After an interrupt, :meth:`recover` has to be called first.

    Not thread-safe: threads that share a cache must take turns.

    Args:
        read: Starts reading an extent into memory, and returns at once.
        sizes: Bytes of memory that each extent needs, by name.
        slots: Memory for extents; there is room for the largest.
        residents: Names of extents that stay in memory, beside the slots, once they have been read.
        stored: Bytes on the drive of each extent, if they differ from ``sizes``.
    """

    def __init__(
        self,
        read: Callable[[str, torch.Tensor], Transfer],
        sizes: Mapping[str, int],
        slots: Slots,
        residents: Collection[str] = (),
        stored: Mapping[str, int] | None = None,
    ) -> None:
        self._reads = _Reads(read, sizes if stored is None else stored)
        self._cache = BlockCache(self._reads, slots, retain=False)
        self.leased = self._cache.leased
        """Bytes of memory that extents have."""
        self._blocks = {key: Block(key, nbytes, stored=True) for key, nbytes in sizes.items()}
        self._cache.keep({block: key in residents for key, block in self._blocks.items()})

    @property
    def bytes_read(self) -> int:
        """Bytes on the drive of all reads started so far, including reads of extents that were never used."""
        return self._reads.nbytes

    @property
    def seconds_waited(self) -> float:
        """Seconds for which :meth:`acquire` has waited."""
        return self._cache.seconds_waited

    @property
    def resident_bytes(self) -> int:
        """Bytes of the extents that stay in memory from their first use on."""
        return sum(block.nbytes for block in self._blocks.values() if block.resident)

    def acquire(self, keys: Sequence[str], then: Iterable[str] = ()) -> list[torch.Tensor]:
        """Begin a use of each of these extents, and return their memory once they have been read. Blocks.

        Args:
            keys: Names of extents, each at most once. Release each of them once.
            then: Names of the extents that will probably be used next, in order; may be endless. Read-ahead follows this
                list from now on, and no longer the previous one.

        Raises:
            OSError: The error of a read. No extent is acquired then.
            OutOfBuffers: If views of released extents keep all memory, or the system has too little. No extent is acquired then.
        """
        blocks = [self._blocks[key] for key in keys]
        self._cache.acquire(blocks, self._with_room(then, blocks))
        return [block.memory.buffer for block in blocks]

    def expect(self, keys: Iterable[str]) -> None:
        """Set the extents that will probably be used next, in order, and start reading them. Never blocks."""
        self._cache.expect(self._with_room(keys, ()))

    def poll(self) -> None:
        """Start reading further expected extents, if there is room for them by now. Never blocks."""
        self._cache.poll()

    def release(self, keys: Iterable[str], changed: bool = False) -> None:
        """End a use of each extent. Never blocks.

        Args:
            keys: Extents that were acquired.
            changed: Whether their memory was changed: they are read again for their next use.
        """
        blocks = [self._blocks[key] for key in keys]
        if changed:
            self._cache.reject(blocks)
        else:
            self._cache.release(blocks)

    def is_resident(self, key: str) -> bool:
        """Return whether an extent stays in memory from its first use on."""
        return self._blocks[key].resident

    def drain(self) -> None:
        """Stop reading ahead, and wait for all reads in flight."""
        self._cache.drain()

    def close(self) -> None:
        """Return all memory. Waits for all reads."""
        self._cache.clear()

    def recover(self) -> list[str]:
        """End all uses after an interrupt, and return the names of the extents that were in use.

        These extents are read again for their next use, since their memory may have been changed.
        """
        left = [block for block in self._blocks.values() if block.users]
        self._cache.end_uses()
        self._cache.reject(left)
        return [block.name for block in left]

    def _with_room(self, keys: Iterable[str], now: Collection[Block]) -> Iterator[Use]:
        """Yield uses of ``keys``, in order, until memory has no more room beside the blocks ``now``."""
        if all(block.resident and block.state is State.CLEAN for block in self._blocks.values()):
            return
        room = self._cache.memory.limit - sum(block.nbytes for block in now if not block.resident)
        free = room == self._cache.memory.limit
        seen = set()
        for key in itertools.islice(keys, 2 * len(self._blocks)):
            block = self._blocks[key]
            if block in seen or (block.resident and block.state is State.CLEAN):
                continue
            if block not in now and not block.users:
                room -= block.nbytes * (2 if free else 1)
                free = False
                if room < 0 and (block.resident or not block.in_memory):
                    return  # what is on its way stays, where what is wanted now needs no room
            seen.add(block)
            yield Use(block)


class _Reads:
    """Reads extents, and counts their bytes."""

    def __init__(self, read: Callable[[str, torch.Tensor], Transfer], stored: Mapping[str, int]) -> None:
        self._read, self._stored = read, stored
        self.nbytes = 0

    def read(self, block: Block, buffer: torch.Tensor) -> Transfer:
        """Start reading an extent, and count its bytes on the drive."""
        reading = self._read(block.name, buffer)
        self.nbytes += self._stored[block.name]
        return reading

    def write(self, block: Block, buffer: torch.Tensor) -> Transfer:
        """Raise RuntimeError: extents are only read, never written back."""
        raise RuntimeError(f"{block!r} cannot be written: weights are only read")
