"""The order in which blocks move, by a drive whose transfers end when they are told to."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from deepnvme.cache.block import Block, State
from deepnvme.cache.block_cache import BlockCache, Use
from deepnvme.cache.block_memory import PooledMemory
from deepnvme.swap import BufferPool, OutOfBuffers

from ..support.patience import PATIENCE, until

SIZE = 8192
STATES = ("a", "b", "c")
GROUPS = 4


class Transfer:
    def __init__(self) -> None:
        self._ended = threading.Event()

    def end(self) -> None:
        self._ended.set()

    def done(self) -> bool:
        return self._ended.is_set()

    def exception(self, timeout: float | None = None) -> None:
        assert self._ended.wait(PATIENCE), "nobody ended this transfer"


class ByHand:
    """``under_way``: what has been started and not ended, as "r0a" for reading block a of group 0."""

    def __init__(self) -> None:
        self.turn = 0  # of the group in use
        self.files: dict[str, torch.Tensor] = {}
        self.under_way: dict[str, Transfer] = {}
        self.before: Callable[[str], object] = lambda name: None

    def read(self, block: Block, buffer: torch.Tensor) -> Any:
        buffer.copy_(self.files[block.name])
        return self._start(f"r{block.name}")

    def write(self, block: Block, buffer: torch.Tensor) -> Any:
        self.files[block.name] = buffer.clone()
        return self._start(f"w{block.name}")

    def distance(self, block: Block) -> int:
        return (int(block.name[0]) - self.turn) % GROUPS if block.name[0].isdigit() else 0

    def _start(self, name: str) -> Transfer:
        self.before(name)
        self.under_way[name] = Transfer()
        return self.under_way[name]

    def end(self, *names: str) -> None:
        for name in names:
            self.under_way.pop(name).end()

    def end_all(self) -> None:
        self.end(*self.under_way)

    def soon(self, *names: str) -> None:
        """Exactly these are under way, or will be before long."""
        until(lambda: set(self.under_way) == set(names))
        assert set(self.under_way) == set(names)


@pytest.fixture
def engine() -> Iterator[ByHand]:
    engine = ByHand()
    yield engine
    for _ in range(100):  # whoever still waits
        engine.end_all()
        if not any(thread.name.startswith("deepnvme-") for thread in threading.enumerate()):
            break
        time.sleep(0.01)


def stored_groups(engine: ByHand) -> list[list[Block]]:
    groups = [[Block(f"{turn}{name}", SIZE, stored=True) for name in STATES] for turn in range(GROUPS)]
    engine.files |= {block.name: torch.full((SIZE,), turn, dtype=torch.uint8) for turn in range(GROUPS) for block in groups[turn]}
    return groups


def cache_of(engine: ByHand, limit: int, budget: int = 1 << 20) -> BlockCache:
    """One whose drive is busy with one block."""
    memory = PooledMemory(BufferPool(budget), limit, lambda held, block: f"{held} bytes are held and {block.nbytes} needed")
    return ByGroups(engine, memory, busy_bytes=SIZE, helper="deepnvme-read-ahead")


class ByGroups(BlockCache):
    """Groups are used in turn."""

    def _distance(self, block: Block) -> int:
        distance: int = self._backing.distance(block)  # type: ignore[attr-defined]
        return distance


def in_background(function: Callable[..., object], *arguments: Any) -> threading.Thread:
    thread = threading.Thread(target=function, args=arguments)
    thread.start()
    return thread


@pytest.fixture
def passing(engine: ByHand) -> tuple[BlockCache, list[list[Block]]]:
    """Room for a group of three blocks and one block more; group 0 is in use, a block of 1 has been read ahead."""
    cache = cache_of(engine, 4 * SIZE)
    groups = stored_groups(engine)
    acquiring = in_background(cache.acquire, groups[0])
    engine.soon("r0a", "r0b", "r0c")
    engine.end_all()
    acquiring.join()
    cache.expect([Use(block) for group in groups[1:] for block in group])
    engine.soon("r1a")
    engine.end("r1a")
    return cache, groups


def test_what_the_next_group_lacks_comes_before_all_else(engine: ByHand, passing: Any) -> None:
    cache, groups = passing
    cache.release(groups[0], changed=True)
    engine.soon("w0a", "w0b")  # room for two: the third is not in anybody's way
    engine.turn = 1
    acquiring = in_background(cache.acquire, groups[1])
    engine.end("w0a")
    engine.soon("r1b", "w0b")
    engine.end("w0b")
    engine.soon("r1b", "r1c")
    engine.end("r1b", "r1c")
    acquiring.join()
    cache.expect(map(Use, groups[2]))
    engine.soon("w0c")  # while the caller computes
    engine.end("w0c")
    engine.soon("r2a")


def test_a_block_that_is_wanted_while_it_is_written_is_not_read_again(engine: ByHand, passing: Any) -> None:
    cache, groups = passing
    cache.expect([])
    cache.release(groups[0][:1], changed=True)
    engine.soon("w0a")
    acquiring = in_background(cache.acquire, groups[0])
    engine.end("w0a")
    acquiring.join()
    engine.soon()
    assert groups[0][0].users == 1


def test_an_idle_drive_writes_all_that_is_to_be_written(engine: ByHand, passing: Any) -> None:
    cache, groups = passing
    cache.expect([])
    cache.release(groups[0], changed=True)
    for name in ("w0a", "w0b", "w0c"):
        engine.soon(name)
        engine.end(name)
    cache.drain()
    assert not any(block.state is State.DIRTY for block in groups[0])


def test_what_is_not_complete_is_written_only_for_its_memory(engine: ByHand) -> None:
    cache = cache_of(engine, SIZE)
    partial, other = Block("partial", SIZE), Block("other", SIZE)
    cache.create(partial)
    cache.release([partial], changed=True, write=False)
    engine.soon()
    creating = in_background(cache.create, other)
    engine.soon("wpartial")
    engine.end("wpartial")
    creating.join()
    assert other.in_memory


def test_a_released_block_that_is_not_in_memory_stays_absent(engine: ByHand) -> None:
    cache = cache_of(engine, SIZE)
    block = Block("block", SIZE)
    cache.release([block], changed=True)
    assert (block.state, block.users) == (State.ABSENT, 0)
    with pytest.raises(RuntimeError, match="<Block block: 8192 bytes, absent> is not in memory"):
        _ = block.memory


def test_memory_that_other_threads_leased_for_it_is_not_waited_for(engine: ByHand) -> None:
    odd = 5000  # not whole pages
    cache = cache_of(engine, odd, budget=2 * SIZE)
    blocks = [Block(str(number), odd) for number in range(3)]
    in_background(lambda: [cache.create(block) for block in blocks[:2]]).join()
    begun = time.monotonic()
    with pytest.raises(OutOfBuffers, match="10000 bytes are held and 5000 needed"):
        cache.create(blocks[2])
    assert time.monotonic() - begun < PATIENCE
