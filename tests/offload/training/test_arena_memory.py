"""ArenaMemory: one pinned region for blocks of any size, and memory beside it for what has no room there."""

from __future__ import annotations

from deepnvme.cache.block import Block, Memory
from deepnvme.offload.training.blocks.blocks_on_drive import ArenaMemory

MIB = 1 << 20


def test_blocks_of_any_size_share_the_region() -> None:
    memory = ArenaMemory(4 * MIB, lambda: None)
    small = [memory.take(Block(str(number), MIB)) for number in range(4)]
    assert all(small)
    assert memory.take(Block("one more", 4096)) is None
    small.clear()
    large = memory.take(Block("large", 4 * MIB))
    assert large is not None
    assert large.buffer.nbytes == 4 * MIB


def test_ended_transfers_are_dropped_for_room() -> None:
    kept: list[Memory | None] = []
    memory = ArenaMemory(MIB, kept.clear)
    kept.append(memory.take(Block("of a transfer that has ended", MIB)))
    assert memory.take(Block("next", MIB)) is not None


def test_what_is_needed_now_has_memory_beside_the_region() -> None:
    memory = ArenaMemory(MIB, lambda: None)
    assert memory.take(Block("too large", 3 * MIB)) is None
    assert memory.grow(Block("too large", 3 * MIB), []).buffer.nbytes == 3 * MIB
    assert memory.limit == MIB
