"""Parts of one region of pinned memory, and the memory of blocks that consists of them."""

from __future__ import annotations

import random

import pytest
import torch

from deepnvme.cache.block import Block, Memory
from deepnvme.memory.pool import OutOfBuffers
from deepnvme.offload import pinned_arena
from deepnvme.offload.pinned_arena import PinnedArena
from deepnvme.offload.training.blocks.blocks_on_drive import ArenaMemory

PAGE = 4096


def test_parts_of_alternating_sizes_never_overlap_and_need_no_new_memory() -> None:
    arena = PinnedArena(64 * PAGE)
    chosen = random.Random(7)
    lent: list[tuple[torch.Tensor, int]] = []
    region = None
    refused = 0
    for number in range(500):
        part = arena.lend(chosen.randrange(1, 20 * PAGE))
        if part is None:
            refused += 1
        else:
            region = region or arena._region
            lent.append((part.fill_(number % 251), number % 251))
        assert all(bool((part == value).all()) for part, value in lent)
        while lent and (part is None or chosen.random() < 0.3):
            lent.pop(chosen.randrange(len(lent)))
            part = torch.empty(0)
    assert 0 < refused < 400
    assert arena._region is region
    assert arena.allocated == 64 * PAGE


def test_a_part_is_aligned_and_its_storage_begins_with_it() -> None:
    arena = PinnedArena(16 * PAGE)
    parts = [arena.lend(nbytes) for nbytes in (1, PAGE, PAGE + 1)]
    for part, nbytes in zip(parts, (1, PAGE, PAGE + 1), strict=True):
        assert part is not None
        assert part.nbytes == nbytes
        assert part.data_ptr() % PAGE == 0
        assert part.storage_offset() == 0
        assert part.untyped_storage().nbytes() == nbytes


def test_memory_is_lent_again_when_the_last_tensor_over_it_is_gone() -> None:
    arena = PinnedArena(4 * PAGE)
    part = arena.lend(4 * PAGE)
    assert part is not None
    view = part[10:20]
    del part
    assert arena.lend(PAGE) is None
    del view
    assert arena.lend(4 * PAGE) is not None


def test_nothing_is_lent_beyond_the_region() -> None:
    arena = PinnedArena(4 * PAGE + 100)
    assert arena.nbytes == 4 * PAGE
    assert arena.lend(4 * PAGE + 1) is None
    assert arena.allocated == 0  # and nothing is pinned for it
    assert arena.lend(0) is None
    assert PinnedArena(0).lend(1) is None


def test_only_memory_that_nobody_has_is_unpinned() -> None:
    arena = PinnedArena(4 * PAGE)
    part = arena.lend(PAGE)
    arena.trim()
    assert arena.allocated == 4 * PAGE
    del part
    arena.trim()
    assert arena.allocated == 0
    assert arena.lend(4 * PAGE) is not None


def test_memory_that_the_system_does_not_have_is_an_error_and_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    arena = PinnedArena(4 * PAGE)

    def refuse(nbytes: int) -> object:
        raise OutOfBuffers(f"no {nbytes} bytes")

    with monkeypatch.context() as patched:
        patched.setattr(pinned_arena, "pinned", refuse)
        with pytest.raises(OutOfBuffers):
            arena.lend(PAGE)
    assert arena.lend(4 * PAGE) is not None


def test_ended_transfers_are_dropped_for_room() -> None:
    kept: list[Memory | None] = []
    memory = ArenaMemory(16 * PAGE, kept.clear)
    kept.append(memory.take(Block("of a transfer that has ended", 16 * PAGE)))
    assert memory.take(Block("next", 16 * PAGE)) is not None


def test_what_is_needed_now_has_memory_beside_the_region() -> None:
    memory = ArenaMemory(16 * PAGE, lambda: None)
    assert memory.take(Block("too large", 48 * PAGE)) is None
    assert memory.grow(Block("too large", 48 * PAGE), []).buffer.nbytes == 48 * PAGE
    assert memory.limit == 16 * PAGE
