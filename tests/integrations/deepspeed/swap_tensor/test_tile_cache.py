"""The order in which tiles move, by an engine whose transfers end when they are told to."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from deepnvme.integrations.deepspeed.swap_tensor import tile_cache
from deepnvme.integrations.deepspeed.swap_tensor.tile import Tile
from deepnvme.integrations.deepspeed.swap_tensor.tile_cache import TileCache
from deepnvme.swap import BufferPool, OutOfBuffers

SIZE = 8192
STATES = ("a", "b", "c")


class Transfer:
    def __init__(self) -> None:
        self._ended = threading.Event()

    def end(self) -> None:
        self._ended.set()

    def done(self) -> bool:
        return self._ended.is_set()

    def exception(self, timeout: float | None = None) -> None:
        assert self._ended.wait(20), "nobody ended this transfer"


class ByHand:
    """Files are in memory; ``under_way``: what has been started and not ended, as "r0a" for reading state a of sub-group 0."""

    def __init__(self) -> None:
        self.files: dict[str, torch.Tensor] = {}
        self.under_way: dict[str, Transfer] = {}
        self.before: Callable[[str], object] = lambda name: None

    def read(self, tensor: torch.Tensor, source: str, offset: int = 0) -> Any:
        tensor.copy_(self.files[source])
        return self._start(f"r{source}")

    def write(self, tensor: torch.Tensor, target: str, offset: int = 0) -> Any:
        self.files[target] = tensor.clone()
        return self._start(f"w{target}")

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
        deadline = time.monotonic() + 5
        while set(self.under_way) != set(names) and time.monotonic() < deadline:
            time.sleep(0.001)
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


@pytest.fixture(autouse=True)
def one_tile_keeps_the_drive_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tile_cache, "_BUSY_BYTES", SIZE)


def stored_groups(engine: ByHand, count: int) -> list[list[Tile]]:
    groups = [[Tile(f"{turn}{name}", SIZE, turn, stored=True) for name in STATES] for turn in range(count)]
    engine.files |= {tile.path: torch.full((SIZE,), tile.turn, dtype=torch.uint8) for group in groups for tile in group}
    return groups


def in_background(function: Callable[..., object], *arguments: Any) -> threading.Thread:
    thread = threading.Thread(target=function, args=arguments)
    thread.start()
    return thread


@pytest.fixture
def passing(engine: ByHand) -> tuple[TileCache, list[list[Tile]]]:
    """Room for a sub-group of three tiles and one tile more; sub-group 0 is in use, a tile of 1 has been read ahead."""
    cache = TileCache(engine, BufferPool(1 << 20), limit=4 * SIZE)
    groups = stored_groups(engine, 4)
    cache.memory.turns = len(groups)
    acquiring = in_background(cache.acquire, groups[0])
    engine.soon("r0a", "r0b", "r0c")
    engine.end_all()
    acquiring.join()
    cache.read_ahead([(tile, cache.memory.limit) for group in groups[1:] for tile in group])
    engine.soon("r1a")
    engine.end("r1a")
    return cache, groups


def test_what_the_next_sub_group_lacks_comes_before_all_else(engine: ByHand, passing: Any) -> None:
    cache, groups = passing
    cache.release(groups[0], changed=True)
    engine.soon("w0a", "w0b")  # room for two: the third is not in anybody's way
    cache.memory.turn = 1
    acquiring = in_background(cache.acquire, groups[1])
    engine.end("w0a")
    engine.soon("r1b", "w0b")
    engine.end("w0b")
    engine.soon("r1b", "r1c")
    engine.end("r1b", "r1c")
    acquiring.join()
    cache.read_ahead([(tile, cache.memory.limit) for tile in groups[2]])
    engine.soon("w0c")  # while the caller computes
    engine.end("w0c")
    engine.soon("r2a")


def test_a_tile_that_is_wanted_while_it_is_written_is_not_read_again(engine: ByHand, passing: Any) -> None:
    cache, groups = passing
    cache.read_ahead([])
    cache.release(groups[0][:1], changed=True)
    engine.soon("w0a")
    acquiring = in_background(cache.acquire, groups[0])
    engine.end("w0a")
    acquiring.join()
    engine.soon()
    assert groups[0][0].in_use


def test_an_idle_drive_writes_all_that_is_to_be_written(engine: ByHand, passing: Any) -> None:
    cache, groups = passing
    cache.read_ahead([])
    cache.release(groups[0], changed=True)
    for name in ("w0a", "w0b", "w0c"):
        engine.soon(name)
        engine.end(name)
    cache.settle(groups[0][2])
    assert not any(tile.dirty for tile in groups[0])


def test_what_is_not_complete_is_written_only_for_its_memory(engine: ByHand) -> None:
    cache = TileCache(engine, BufferPool(1 << 20), limit=SIZE)
    partial, other = Tile("partial", SIZE, 0), Tile("other", SIZE, 1)
    cache.create(partial)
    cache.release([partial], changed=True, complete=False)
    engine.soon()
    creating = in_background(cache.create, other)
    engine.soon("wpartial")
    engine.end("wpartial")
    creating.join()
    assert other.lease is not None


def test_a_released_tile_that_is_not_in_memory_stays_clean(engine: ByHand) -> None:
    cache = TileCache(engine, BufferPool(1 << 20), limit=SIZE)
    tile = Tile("tile", SIZE, 0)
    cache.release([tile], changed=True)
    assert not tile.dirty
    with pytest.raises(RuntimeError, match="<Tile tile: 8192 bytes> is not in memory"):
        _ = tile.memory


def test_memory_that_other_threads_leased_for_it_is_not_waited_for(engine: ByHand) -> None:
    odd = 5000  # not whole pages
    cache = TileCache(engine, BufferPool(2 * SIZE), limit=odd)
    tiles = [Tile(str(number), odd, number) for number in range(3)]
    in_background(lambda: [cache.create(tile) for tile in tiles[:2]]).join()
    begun = time.monotonic()
    with pytest.raises(OutOfBuffers, match="needs 10000 bytes of swap buffers and 5000 more; buffer_count allows 5000, set it"):
        cache.create(tiles[2])
    assert time.monotonic() - begun < 10
