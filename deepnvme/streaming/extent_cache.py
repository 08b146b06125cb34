"""Extents of weights in memory: read before their use, as far ahead as there is room."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

import torch

from deepnvme.cache.block import Block, State
from deepnvme.cache.block_cache import BlockCache, Use
from deepnvme.memory.lease import Transfer

from .extent_memory import Slots


class ExtentCache:
    """Has extents in memory while they are used, and reads ahead those that are expected.

    - Each use of an extent lies between :meth:`acquire` and :meth:`release`; its memory does not change meanwhile. Uses may
      overlap: an extent is in memory once, however many use it.
    - Extents are read ahead as far as there is room beside those in use. If these need no room, as much as the first expected
      one needs is left free. So a wrong expectation seldom makes anybody wait.
    - Memory that was released is not read into while somebody has a view of it. Until then it is missing here.
    - If more is used at a time than there is room for, there is more until it is released.
    - An error is raised only where its extent is acquired, by a read that began there. What failed in reading ahead is read
      once more, since the fault may have been reported, and removed, before.
    - After an interrupt, :meth:`recover` has to be called first.

    Not thread-safe: callers that share one take turns.

    Args:
        read: Starts reading an extent into memory, and returns at once.
        sizes: Bytes of memory that each extent needs.
        slots: The memory; there is room for the largest extent.
        residents: Extents that stay in memory of their own once they have been read.
        stored: Bytes on the drive of each extent, where these differ from ``sizes``.
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
        self._blocks = {key: Block(key, nbytes, stored=True) for key, nbytes in sizes.items()}
        self.keep(residents)

    @property
    def bytes_read(self) -> int:
        """Bytes on the drive of all reads that have begun, also of those that were in vain."""
        return self._reads.nbytes

    @property
    def seconds_waited(self) -> float:
        """Seconds for which :meth:`acquire` has waited."""
        return self._cache.seconds_waited

    def acquire(self, keys: Sequence[str], then: Iterable[str] = ()) -> list[torch.Tensor]:
        """Begin a use of these extents, and return their memory when they have been read.

        Args:
            keys: Different extents. Each has to be released once.
            then: What will be wanted next, in order; may be endless. It is read ahead from now on, in place of what was expected.

        Raises:
            OSError: What a read has ended with. Nothing is acquired then.
            OutOfBuffers: If all memory is held by others. Nothing is acquired then.
        """
        blocks = [self._blocks[key] for key in keys]
        self._cache.acquire(blocks, self._with_room(then, blocks))
        return [block.memory.buffer for block in blocks]

    def expect(self, keys: Iterable[str]) -> None:
        """Set what will be wanted next, in order, in place of what was expected. Never blocks."""
        self._cache.expect(self._with_room(keys, ()))

    def poll(self) -> None:
        """Read more of what is expected, if there is room for it by now. Never blocks."""
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

    def keep(self, residents: Collection[str]) -> None:
        """Set which extents stay in memory once they have been read. None may be in use."""
        self._cache.keep({block: key in residents for key, block in self._blocks.items()})

    def drain(self) -> None:
        """Expect nothing any more, and wait for all reads."""
        self._cache.drain()

    def close(self) -> None:
        """Give all memory back. Waits for all reads."""
        self._cache.clear()

    def recover(self) -> list[str]:
        """End all uses after an interrupt. Returns the extents that were in use: they are read again, as they may be changed."""
        return [block.name for block in self._cache.recover()]

    def _with_room(self, keys: Iterable[str], now: Collection[Block]) -> Iterator[Use]:
        """Return uses of those of ``keys`` for which there is room beside ``now``."""
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
        """Raise RuntimeError: extents have no newer bytes to write."""
        raise RuntimeError(f"{block!r} cannot be written: weights are only read")
