"""Ctrl-C at every point of a store's operations: it works afterwards, and holds the old or the new state."""

from __future__ import annotations

import concurrent.futures
import contextlib
import errno
import gc
import itertools
import mmap
import random
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import deepnvme
from deepnvme.memory.tensor_bytes import copy_many
from deepnvme.store import writing
from deepnvme.swap import BufferPool, TensorStore

from ..faults.torture.interruption import Interruption
from ..support.engines import FailedTransfer
from ..support.patience import PATIENCE

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::ResourceWarning")]

Tensors = dict[str, torch.Tensor]
COUNT = 12


@pytest.fixture(autouse=True)
def several_parts_of_a_put(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one is being written when the next is prepared."""
    monkeypatch.setattr(writing, "_BATCH", 4)


def tensors(seed: int, count: int = COUNT) -> Tensors:
    """Of other sizes for each seed; small ones, one that is written by itself, and one that two directories share."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [1000 + 1500 * ((seed + index) % 4) for index in range(count)]
    made = {
        f"tensor {index}": torch.randint(0, 256, (size,), generator=generator, dtype=torch.uint8)
        for index, size in enumerate(sizes)
    }
    made["large"] = torch.full(((600 << 10) + seed * 4096,), seed % 256, dtype=torch.uint8)
    made["striped"] = torch.full((4 << 20,), (seed + 1) % 256, dtype=torch.uint8)
    return made


def same(found: Tensors, expected: Tensors) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def held(store: TensorStore) -> Tensors:
    for _ in range(20):
        with contextlib.suppress(KeyError):  # of an interrupted put, whose transfers have ended only now
            return store.get_many(store.names()).result()
    raise AssertionError(f"listed, and cannot be read: {store.names()}")


class World:
    """A store that holds one state, and is to hold another."""

    def __init__(self, directories: list[Path], persist: bool, checksum: bool, engine: Any) -> None:
        self.directories, self.persist, self.checksum, self.engine = directories, persist, checksum, engine
        self.pool = BufferPool(32 << 20)
        self.store = self.open()
        self.state: Tensors = {}
        self.seed = 0

    def open(self) -> TensorStore:
        options: dict[str, Any] = {"checksum": self.checksum, "engine": self.engine, "pool": self.pool}
        return TensorStore(self.directories, persist=self.persist, **options)

    def next_state(self) -> Tensors:
        self.seed += 1
        return tensors(self.seed)

    def interrupted(self, number: int, operation: Callable[[], object]) -> tuple[Interruption, BaseException | None]:
        """With the error, whose traceback keeps the frames that were interrupted alive."""
        interruption = Interruption(number, skip=(concurrent.futures.__path__[0], threading.__file__))
        try:
            with interruption:
                operation()
        except KeyboardInterrupt as error:
            assert interruption.where
            return interruption, error
        return interruption, None

    def check(self, *states: Tensors, waiting: bool = False) -> None:
        """Another thread finds one of the states, or damaged names in a store that does not persist; all is put anew then.

        With ``waiting``, it first waits for all that is under way, what was interrupted included, where a call does only that.
        """
        with concurrent.futures.ThreadPoolExecutor(1) as other:
            other.submit(self._check, states, waiting).result(PATIENCE)

    def _check(self, states: tuple[Tensors, ...], waiting: bool) -> None:
        store = self.store
        if self.persist and waiting:
            store.commit()
            found = store.get_many(store.names()).result()  # nothing is under way any more that could take a name back
            assert any(same(found, state) for state in states), sorted(found)
        elif self.persist:
            found = held(store)
            assert any(same(found, state) for state in states), sorted(found)
        else:
            for name in store.names():
                try:
                    found = {name: store.get(name).result()}
                except OSError as error:
                    if "is damaged" in str(error):
                        continue
                    raise
                assert any(name in state and torch.equal(found[name], state[name]) for state in states), name
        self.put_anew()

    def put_anew(self) -> None:
        self.state = self.next_state()
        for name in self.store.names():
            if name not in self.state:
                self.store.delete(name).result()
        self.store.put_many(self.state).result()
        if self.persist:
            self.store.commit()
        assert same(held(self.store), self.state)
        used = sum(self.store.used_bytes)
        assert used == sum(-(-tensor.nbytes // 4096) * 4096 for tensor in self.state.values())

    def reopened(self, *states: Tensors) -> None:
        self.store.close()
        self.store = self.open()
        if self.persist:
            found = held(self.store)
            assert any(same(found, state) for state in states)
        self.put_anew()


@pytest.fixture(params=["persisted", "persisted in two", "not persisted", "not persisted in two"])
def world(request: pytest.FixtureRequest, drive: Path, engine: deepnvme.Engine) -> Iterator[World]:
    directories = [drive / "a", drive / "b"] if "two" in request.param else [drive / "a"]
    world = World(directories, not request.param.startswith("not"), "two" in request.param, engine)
    world.put_anew()
    yield world
    world.store.close()


def chosen(total: int, tries: int) -> list[int]:
    """Points spread over all of them, other ones in each run of the torture (parts/interrupts_store.py), which tries all."""
    return sorted(random.Random(total).sample(range(1, total + 1), min(tries, total)))


def counted(world: World, operation: Callable[[], object]) -> int:
    interruption, _ = world.interrupted(0, operation)
    world.put_anew()
    return interruption.passed


@pytest.mark.parametrize("tries", [30])
def test_a_put_and_a_commit(world: World, tries: int) -> None:
    def replace() -> None:
        world.store.put_many(new).result()
        if world.persist:
            world.store.commit()

    new = world.next_state()
    total = counted(world, replace)
    for number in chosen(total, tries):
        old, new = world.state, world.next_state()
        _, error = world.interrupted(number, replace)
        if number % 3:
            world.check(old, new, waiting=number % 3 == 1)
        else:
            world.reopened(old, new)
        del error
        assert world.pool.in_use == 0


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt, OSError])
@pytest.mark.parametrize("when", ["prepared", "written"])
def test_a_put_whose_second_part_cannot_be_written(
    world: World, error: type[BaseException], when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first part is under way then, and is undone with it. An error of the drive damages only the tensors that it names."""
    write = world.engine.write
    prepared = 0

    def failing_prepare(*arguments: Any) -> None:
        nonlocal prepared
        prepared += 1
        if prepared == 2 and when == "prepared":
            raise error(errno.EIO, "as asked for")
        copy_many(*arguments)

    def failing_write(*arguments: Any) -> Any:
        if prepared < 2:
            return write(*arguments)
        if error is OSError:
            return FailedTransfer(OSError(errno.EIO, "as asked for"))
        raise error

    old, new = world.state, world.next_state()
    with monkeypatch.context() as patched:
        patched.setattr(writing, "copy_many", failing_prepare)
        if when == "written":
            patched.setattr(world.engine, "write", failing_write)
        with pytest.raises(error):
            world.store.put_many(new).result()
    assert prepared >= 2
    if world.persist and error is OSError and when == "written":
        found = held(world.store)
        replaced = [name for name, tensor in found.items() if torch.equal(tensor, new[name])]
        assert 4 <= len(replaced) < len(new)
        assert same(found, {**old, **{name: new[name] for name in replaced}})
        world.put_anew()
    else:
        world.check(old, new)
    assert world.pool.in_use == 0


@pytest.mark.parametrize("tries", [15])
def test_deletes_gets_and_reserves(world: World, tries: int) -> None:
    def use() -> None:
        world.store.get_many(["tensor 1", "tensor 2", "striped"]).result()
        world.store.get("large", out=out).result()
        world.store.delete("tensor 3").result()
        world.store.map("large")
        world.store.reserve(8 << 20)

    out = torch.empty_like(world.state["large"])
    total = counted(world, use)
    for number in chosen(total, tries):
        old = world.state
        out = torch.empty_like(old["large"])
        _, error = world.interrupted(number, use)
        world.check(old, {name: tensor for name, tensor in old.items() if name != "tensor 3"}, waiting=bool(number % 2))
        del error
        assert world.pool.in_use == 0


@pytest.mark.parametrize("tries", [30])
def test_closing_and_opening(world: World, tries: int) -> None:
    def reopen() -> None:
        world.store.close()
        world.store = world.open()

    total = counted(world, reopen)
    for number in chosen(total, tries):
        old = world.state
        store = world.store
        _, error = world.interrupted(number, reopen)
        if world.store is store:
            store.close()
            if not world.persist:
                left = [path for directory in world.directories for path in directory.glob("*.data")]
                assert all(path.stat().st_size == 0 for path in left)  # which the next owner removes
            world.store = world.open()  # the error's traceback is alive, and locks nothing
        if world.persist:
            world.check(old)
        else:
            world.put_anew()
        del error
        assert world.pool.in_use == 0


def test_opening_that_was_interrupted_leaves_no_directory(drive: Path, engine: deepnvme.Engine) -> None:
    opened: list[TensorStore] = []

    def attempt(number: int) -> Interruption:
        interruption = Interruption(number)
        try:
            with interruption:
                opened.append(TensorStore(drive / "new" / "store", engine=engine))
        except KeyboardInterrupt:
            assert interruption.where
        for store in opened:
            store.close()
        opened.clear()
        TensorStore(drive / "new" / "store", engine=engine).close()
        assert not (drive / "new").exists(), interruption.where
        return interruption

    attempt(0)
    for number in chosen(attempt(0).passed, 100):
        attempt(number)


@pytest.mark.parametrize("persist", [False, True])
def test_a_store_that_is_dropped_locks_nothing(drive: Path, engine: deepnvme.Engine, persist: bool) -> None:
    """Ctrl-C in a finalizer ends it, and what it had to close closes itself."""
    gc.collect()
    gc.freeze()  # no other garbage is to be looked for, each time
    for number in itertools.count(1, 3):
        stores = [TensorStore([drive / "a", drive / "b"], persist=persist, engine=engine)]
        stores[0].put("tensor", torch.ones(5000)).result()
        interruption = Interruption(number)
        with contextlib.suppress(KeyboardInterrupt), interruption:
            stores.clear()
            gc.collect()
        TensorStore([drive / "a", drive / "b"], persist=persist, engine=engine).close()
        if not interruption.where:
            break
    gc.unfreeze()
    assert number > 20


def test_a_mapping_that_is_dropped_is_unmapped(drive: Path, engine: deepnvme.Engine) -> None:
    def addresses() -> int:
        return int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE

    with TensorStore(drive / "a", engine=engine) as store:
        store.put("tensor", torch.ones(1 << 24)).result()
        before = addresses()
        for number in range(1, 20):
            mapped = [store.map("tensor")]
            with contextlib.suppress(KeyboardInterrupt), Interruption(number):
                mapped.clear()
        assert addresses() - before < 1 << 26


def test_the_transfer_is_still_under_way(drive: Path, faulty: Any, testing: Any) -> None:
    """What an interrupted put has started goes on writing to space that nobody else gets before it has ended."""
    gate = testing.Gate()
    world = World([drive / "a"], True, False, faulty("threads", gate=gate, block_size=1 << 20))
    world.put_anew()
    old = world.state
    new = world.next_state()
    total = counted(world, lambda: world.store.put_many(new))
    for number in chosen(total, 15):
        old, new = world.state, world.next_state()
        gate.hold()
        _, error = world.interrupted(number, lambda: world.store.put_many(new))  # noqa: B023 - called at once
        other = world.store.put("other", torch.full((5000,), 7, dtype=torch.uint8))
        gate.release()
        other.result()
        assert torch.equal(world.store.get("other").result(), torch.full((5000,), 7, dtype=torch.uint8))
        world.store.delete("other").result()
        world.check(old, new)
        del error
        assert world.pool.in_use == 0
    world.store.close()
    shutil.rmtree(drive / "a")
