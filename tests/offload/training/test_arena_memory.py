"""ArenaMemory: one pinned region for blocks of any size, and memory beside it for what has no room there."""

from __future__ import annotations

from deepnvme.cache.block import Block, Memory
from deepnvme.offload.training.blocks.blocks_on_drive import ArenaMemory

MIB = 1 << 20


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
