"""Whatever is acquired, changed, released, expected, kept, discarded, broken: each use sees the newest bytes; none are lost."""

from __future__ import annotations

import contextlib
import errno
import gc
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from deepnvme.cache.block import Block, State
from deepnvme.cache.block_cache import BlockCache, Use
from deepnvme.cache.block_memory import PooledMemory
from deepnvme.swap import BufferPool

from ..support.examples import examples

PAGE = 4096
SIZES = {"a": PAGE, "b": PAGE, "c": 2 * PAGE, "d": PAGE, "e": 3 * PAGE, "f": PAGE}
LIMIT = 5 * PAGE


class SlowTransfer:
    """Ends when time passes: time does while somebody waits."""

    def __init__(self, drive: SlowDrive, name: str, end: Callable[[], object], error: OSError | None) -> None:
        self.name = name
        self.error = error
        self._drive, self._end, self._done = drive, end, False

    def done(self) -> bool:
        return self._done

    def exception(self, timeout: float | None = None) -> OSError | None:
        while not self._done:
            self._drive.pass_time()
            if timeout is not None and not self._done:
                raise TimeoutError
        return self.error

    def end(self) -> None:
        self._done = True
        if self.error is None:
            self._end()


class SlowDrive:
    """Transfers in the order in which they began, at most one for each block."""

    def __init__(self) -> None:
        self.contents: dict[str, int] = {}
        self.under_way: list[SlowTransfer] = []
        self.begun: list[str] = []
        self.failing: set[str] = set()
        """Transfers that end with an error, as "r" or "w" and the block's name."""
        self.refusing: set[str] = set()
        """Transfers that cannot be started."""

    def read(self, block: Block, buffer: torch.Tensor) -> SlowTransfer:
        return self._start("r", block, lambda: buffer.fill_(self.contents[block.name]))

    def write(self, block: Block, buffer: torch.Tensor) -> SlowTransfer:
        value = int(buffer[0])

        def end() -> None:
            assert torch.equal(buffer, torch.full_like(buffer, value)), "changed while it was written"
            self.contents[block.name] = value

        return self._start("w", block, end)

    def pass_time(self) -> None:
        if self.under_way:
            self.under_way.pop(0).end()

    def _start(self, kind: str, block: Block, end: Callable[[], object]) -> SlowTransfer:
        assert all(transfer.name[1:] != block.name for transfer in self.under_way), "two transfers of one block"
        name = kind + block.name
        if name in self.refusing:
            raise OSError(errno.EAGAIN, f"refused {name}")
        self.begun.append(name)
        error = OSError(errno.EIO, f"failed {name}") if name in self.failing else None
        self.under_way.append(SlowTransfer(self, name, end, error))
        return self.under_way[-1]


def cache_of(drive: SlowDrive, limit: int = LIMIT, **options: Any) -> BlockCache:
    memory = PooledMemory(BufferPool(64 * PAGE), limit, lambda held, block: f"{held} held, {block.nbytes} wanted")
    return BlockCache(drive, memory, **options)


def blocks_of(drive: SlowDrive, names: Iterable[str] = SIZES) -> dict[str, Block]:
    drive.contents |= {name: index + 1 for index, name in enumerate(names)}
    return {name: Block(name, SIZES[name], stored=True) for name in names}


def value_of(block: Block) -> int:
    buffer = block.memory.buffer
    assert torch.equal(buffer, buffer[:1].expand_as(buffer))
    return int(buffer[0])


@pytest.fixture
def drive() -> SlowDrive:
    return SlowDrive()


def test_what_is_expected_is_read_before_it_is_wanted_and_beside_what_is_used(drive: SlowDrive) -> None:
    cache, blocks = cache_of(drive), blocks_of(drive)
    cache.acquire([blocks["a"]], [Use(blocks[name]) for name in "bcde"])
    assert drive.begun == ["ra", "rb", "rc", "rd"]
    cache.acquire([blocks["b"]])
    cache.release([blocks["a"], blocks["b"]])
    assert drive.begun == ["ra", "rb", "rc", "rd"]  # e needs the room of all that is clean, and c and d are needed before
    cache.acquire([blocks["c"], blocks["d"]])
    cache.release([blocks["c"], blocks["d"]])
    cache.expect([Use(blocks["e"])])
    assert drive.begun[4:] == ["re"]


def test_an_expected_use_may_be_limited_to_a_part_of_the_memory(drive: SlowDrive) -> None:
    cache, blocks = cache_of(drive), blocks_of(drive)
    cache.expect([Use(blocks["a"], 2 * PAGE), Use(blocks["b"], 2 * PAGE), Use(blocks["d"], 2 * PAGE)])
    assert drive.begun == ["ra", "rb"]


@pytest.mark.parametrize("refused", [False, True])
def test_an_error_of_reading_is_raised_where_the_block_is_wanted(drive: SlowDrive, refused: bool) -> None:
    cache, blocks = cache_of(drive), blocks_of(drive)
    (drive.refusing if refused else drive.failing).add("rb")
    cache.acquire([blocks["a"]], [Use(blocks["b"])])
    with pytest.raises(OSError, match="refused rb" if refused else "failed rb"):
        cache.acquire([blocks["b"]])
    assert (blocks["b"].users, blocks["b"].state, cache.used) == (0, State.ABSENT, PAGE)
    drive.failing, drive.refusing = set(), set()
    cache.acquire([blocks["b"]])
    assert value_of(blocks["b"]) == 2


def test_an_error_of_reading_ahead_is_not_raised_once_the_fault_is_gone(drive: SlowDrive) -> None:
    cache, blocks = cache_of(drive), blocks_of(drive)
    drive.failing = {"rb"}
    cache.expect([Use(blocks["b"])])
    drive.failing = set()
    cache.acquire([blocks["b"]])
    assert drive.begun == ["rb", "rb"]


def test_a_write_that_failed_is_raised_by_the_next_acquire_and_written_again(drive: SlowDrive) -> None:
    cache, blocks = cache_of(drive), blocks_of(drive)
    cache.acquire([blocks["a"]])
    blocks["a"].memory.buffer.fill_(99)
    drive.failing = {"wa"}
    cache.release([blocks["a"]], changed=True)
    drive.pass_time()
    with pytest.raises(OSError, match="failed wa"):
        cache.acquire([blocks["b"]])
    assert (blocks["a"].state, blocks["b"].users, drive.begun) == (State.DIRTY, 0, ["ra", "wa"])
    with pytest.raises(OSError, match="failed wa"):
        cache.flush(blocks.values())
    drive.failing = set()
    cache.flush(blocks.values())
    assert drive.contents["a"] == 99


def test_an_error_that_is_gone_keeps_nothing_of_its_callers(drive: SlowDrive) -> None:
    cache, blocks = cache_of(drive), blocks_of(drive)
    drive.failing = {"ra", "wb"}
    seen: list[weakref.ref[BlockCache]] = []

    def fail(name: str) -> None:
        local = cache_of(drive)
        seen.append(weakref.ref(local))
        cache.acquire([blocks[name]])
        cache.release([blocks[name]], changed=True)
        drive.pass_time()
        cache.acquire([blocks["c"]])

    gc.disable()
    try:
        for name in "ab":
            with contextlib.suppress(OSError):
                fail(name)
        assert [each() for each in seen] == [None, None]
    finally:
        gc.enable()


def test_waits_are_told_apart_by_what_they_were_for(drive: SlowDrive) -> None:
    cache, blocks = cache_of(drive, limit=SIZES["a"]), blocks_of(drive)
    assert SIZES["a"] == SIZES["b"]
    cache.acquire([blocks["a"]])
    to_read = cache.seconds_waited
    assert to_read > 0 == cache.seconds_waited_to_write
    blocks["a"].memory.buffer.fill_(99)
    cache.release([blocks["a"]], changed=True)
    cache.acquire([blocks["b"]])  # has the memory of "a" when that is written, and is read then
    assert drive.begun == ["ra", "wa", "rb"]
    to_write = cache.seconds_waited_to_write
    assert 0 < to_write < cache.seconds_waited - to_read
    cache.release([blocks["b"]], changed=True)
    cache.flush([blocks["b"]])
    assert cache.seconds_waited_to_write > to_write


def test_memory_that_was_grown_for_one_block_goes_to_no_other(drive: SlowDrive) -> None:
    cache, blocks = cache_of(drive, limit=3 * PAGE), blocks_of(drive)
    drive.failing = {"rb"}
    cache.expect([Use(blocks["b"])])
    drive.failing = set()
    cache.acquire([blocks["b"], blocks["e"]])
    assert (value_of(blocks["b"]), value_of(blocks["e"])) == (2, 5)
    assert blocks["e"].memory.nbytes == 3 * PAGE


def test_a_use_that_was_rejected_is_read_again(drive: SlowDrive) -> None:
    cache, blocks = cache_of(drive), blocks_of(drive)
    cache.acquire([blocks["a"]])
    blocks["a"].memory.buffer.fill_(99)
    cache.reject([blocks["a"]])
    cache.acquire([blocks["a"]])
    assert value_of(blocks["a"]) == 1


def test_all_uses_can_be_ended_at_once(drive: SlowDrive) -> None:
    cache, blocks = cache_of(drive), blocks_of(drive)
    cache.acquire([blocks["a"]])
    cache.acquire([blocks["a"], blocks["b"]])
    cache.end_uses()
    assert [blocks[name].users for name in "ab"] == [0, 0]


def test_what_was_written_stays_until_its_memory_is_needed_and_the_block_used_longest_ago_goes_first(drive: SlowDrive) -> None:
    cache, blocks = cache_of(drive, limit=3 * PAGE), blocks_of(drive)
    for name in "abd":
        cache.create(blocks[name])
        cache.release([blocks[name]], changed=True)
    cache.drain()
    assert [blocks[name].state for name in "abd"] == [State.CLEAN] * 3
    cache.acquire([blocks["a"]])
    cache.release([blocks["a"]])
    cache.acquire([blocks["f"]])
    assert [blocks[name].in_memory for name in "abd"] == [True, False, True]


def test_what_was_written_may_give_its_memory_back_at_once_also_if_it_is_expected(drive: SlowDrive) -> None:
    cache, blocks = cache_of(drive, limit=3 * PAGE, retain=False), blocks_of(drive)
    cache.create(blocks["a"])
    cache.release([blocks["a"]], changed=True)
    cache.acquire([blocks["b"]], then=[Use(blocks["a"])])
    drive.pass_time()
    cache.poll()
    assert blocks["a"].state is State.ABSENT


def test_a_block_may_be_written_to_another_place_than_it_was_read_from(drive: SlowDrive) -> None:
    cache, blocks = cache_of(drive), blocks_of(drive)
    cache.acquire([blocks["a"]])
    blocks["a"].memory.buffer.fill_(99)
    blocks["a"].name = "a.new"
    cache.release([blocks["a"]], changed=True)
    cache.drain()
    assert (drive.contents["a"], drive.contents["a.new"]) == (1, 99)
    cache.clear()
    cache.acquire([blocks["a"]])
    assert value_of(blocks["a"]) == 99


def test_what_could_not_be_read_ahead_is_told_if_it_is_not_to_be_read_again(drive: SlowDrive) -> None:
    cache, blocks = cache_of(drive, read_again=False), blocks_of(drive)
    for again in (False, True):
        drive.failing = {"ra"}
        cache.expect([Use(blocks["a"])])
        drive.pass_time()
        drive.failing = set()
        cache.expect([Use(blocks["b"])] if again else [Use(blocks["b"]), Use(blocks["a"])])
        if not again:
            with pytest.raises(OSError, match="failed ra"):
                cache.acquire([blocks["a"]])
        cache.acquire([blocks["a"]])
        assert value_of(blocks["a"]) == 1
        cache.clear()


def test_what_could_not_be_read_ahead_is_read_if_nobody_expected_it_any_more_when_it_failed(drive: SlowDrive) -> None:
    cache, blocks = cache_of(drive, read_again=False), blocks_of(drive)
    drive.failing = {"ra"}
    cache.expect([Use(blocks["a"])])
    cache.drain()
    drive.failing = set()
    cache.acquire([blocks["a"]])
    assert value_of(blocks["a"]) == 1


def test_an_interrupt_of_dropping_all_leaves_nothing_that_could_be_written(
    drive: SlowDrive, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, blocks = cache_of(drive), blocks_of(drive)
    cache.create(blocks["a"])
    cache.create(blocks["b"])
    cache.release([blocks["a"]], changed=True, write=False)
    cache.expect([Use(blocks["d"])])
    with monkeypatch.context() as patch:
        patch.setattr(SlowTransfer, "exception", interrupt)
        with pytest.raises(KeyboardInterrupt):
            cache.clear()
    assert [blocks[name].state for name in "abd"] == [State.ABSENT, State.ABSENT, State.READING]
    assert cache.used == PAGE


def interrupt(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def test_residents_of_a_pool_may_have_memory_beside_the_limit(drive: SlowDrive) -> None:
    pool = BufferPool(64 * PAGE)
    memory = PooledMemory(pool, PAGE, lambda held, block: f"{held} held, {block.nbytes} wanted", separate_residents=True)
    cache, blocks = BlockCache(drive, memory), blocks_of(drive)
    cache.keep({blocks["e"]: True})
    for name in "eab":
        cache.acquire([blocks[name]])
        cache.release([blocks[name]])
    assert [blocks[name].in_memory for name in "eab"] == [True, False, True]
    assert (cache.used, pool.in_use) == (PAGE, 4 * PAGE)


def check_is_of(error: OSError, *transfers: str) -> None:
    """It is of one of these transfers, or of one of a kind."""
    assert str(error.strerror).split()[1].startswith(transfers)


names = st.sampled_from([*SIZES])


class Rules(RuleBasedStateMachine):
    """Against a dictionary: the value that the bytes of each block have, for whoever uses it next."""

    retain = True

    def __init__(self) -> None:
        super().__init__()
        self.drive = SlowDrive()
        self.blocks = blocks_of(self.drive)
        self.values = dict(self.drive.contents)
        self.cache = cache_of(self.drive, retain=self.retain)
        self.used: list[str] = []
        self.next_value = 10
        self.most_needed = 0

    def will_need(self, wanted: list[str]) -> None:
        """Memory grows for what is used together with what cannot go: it is not on the drive yet, or resident."""
        staying = {name for name, block in self.blocks.items() if block.resident or block.state is not State.CLEAN}
        needed = {name for name in staying if self.blocks[name].in_memory}.union(self.used, wanted)
        self.most_needed = max(self.most_needed, sum(map(SIZES.__getitem__, needed)))

    def new_value(self, name: str) -> None:
        self.next_value = self.next_value % 250 + 1
        self.blocks[name].memory.buffer.fill_(self.next_value)
        self.values[name] = self.next_value

    @rule(wanted=st.lists(names, min_size=1, max_size=2, unique=True), then=st.lists(names, max_size=4))
    def acquire(self, wanted: list[str], then: list[str]) -> None:
        if not set(wanted) <= set(self.values):
            return
        users = [self.blocks[name].users for name in wanted]
        self.will_need(wanted)
        try:
            self.cache.acquire([self.blocks[name] for name in wanted], [Use(self.blocks[name]) for name in then])
        except OSError as error:
            check_is_of(error, "w", *(f"r{name}" for name in wanted))
            assert [self.blocks[name].users for name in wanted] == users
        else:
            self.used += wanted
            assert [value_of(self.blocks[name]) for name in wanted] == [self.values[name] for name in wanted]

    @rule(name=names)
    def create(self, name: str) -> None:
        if name in self.used:
            return
        self.will_need([name])
        try:
            self.cache.create(self.blocks[name])
        except OSError as error:
            check_is_of(error, "w")
            assert self.blocks[name].users == 0
        else:
            self.used.append(name)
            self.new_value(name)

    @precondition(lambda self: self.used)
    @rule(data=st.data(), change=st.booleans(), write=st.booleans())
    def release(self, data: st.DataObject, change: bool, write: bool) -> None:
        name = self.used.pop(data.draw(st.integers(0, len(self.used) - 1)))
        assert value_of(self.blocks[name]) == self.values[name]
        if change:
            self.new_value(name)
        self.cache.release([self.blocks[name]], changed=change, write=write)

    @precondition(lambda self: self.used)
    @rule(data=st.data())
    def reject(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.used))
        if self.used.count(name) == 1 and self.blocks[name].state is State.CLEAN:
            self.used.remove(name)
            self.blocks[name].memory.buffer.zero_()
            self.cache.reject([self.blocks[name]])

    @rule(name=names)
    def discard(self, name: str) -> None:
        if name not in self.used:
            self.cache.discard(self.blocks[name])
            self.values.pop(name, None)
            assert not self.blocks[name].in_memory

    @rule(order=st.lists(names, max_size=6))
    def expect(self, order: list[str]) -> None:
        self.cache.expect([Use(self.blocks[name]) for name in order])

    @rule(resident=st.dictionaries(names, st.booleans(), max_size=3))
    def keep(self, resident: dict[str, bool]) -> None:
        self.cache.keep({self.blocks[name]: stays for name, stays in resident.items()})

    @rule(name=names)
    def write(self, name: str) -> None:
        self.cache.write(self.blocks[name])

    @rule()
    def flush(self) -> None:
        try:
            self.cache.flush(self.blocks.values())
        except OSError as error:
            check_is_of(error, "w")
        else:
            unused = set(self.values) - set(self.used)
            assert {name: self.drive.contents[name] for name in unused} == {name: self.values[name] for name in unused}

    @rule()
    def drop_clean(self) -> None:
        self.cache.drop_clean()
        assert all(block.state is not State.CLEAN or block.users for block in self.blocks.values())

    @rule()
    def clear(self) -> None:
        self.used.clear()
        self.cache.clear()
        for name in list(self.values):
            if self.blocks[name].stored:
                self.values[name] = self.drive.contents[name]
            else:
                del self.values[name]
        assert not any(block.in_memory for block in self.blocks.values())

    @rule(count=st.integers(1, 3))
    def time_passes(self, count: int) -> None:
        for _ in range(count):
            self.drive.pass_time()
        self.cache.poll()

    @rule(broken=st.sets(st.sampled_from([kind + name for kind in "rw" for name in SIZES]), max_size=3), refuse=st.booleans())
    def break_drive(self, broken: set[str], refuse: bool) -> None:
        self.drive.failing, self.drive.refusing = (set(), broken) if refuse else (broken, set())

    @invariant()
    def uses_see_their_bytes(self) -> None:
        assert [value_of(self.blocks[name]) for name in self.used] == [self.values[name] for name in self.used]
        assert {name: block.users for name, block in self.blocks.items() if block.users} == {
            name: self.used.count(name) for name in self.used
        }

    @invariant()
    def memory_is_within_its_limit(self) -> None:
        held = sum(block.nbytes for block in self.blocks.values() if block.in_memory)
        assert self.cache.used == held
        assert held <= max(LIMIT, self.most_needed)  # what has grown beyond the limit stays until the memory is needed

    def teardown(self) -> None:
        self.drive.failing, self.drive.refusing = set(), set()
        self.cache.poll()
        for name in self.used:
            self.cache.release([self.blocks[name]])
        self.cache.drain()
        self.cache.flush(self.blocks.values())
        assert {name: self.drive.contents[name] for name in self.values} == self.values
        self.cache.clear()
        assert self.cache.used == 0
        assert not self.drive.under_way


class RulesWithoutRetaining(Rules):
    """Clean blocks that are not expected are dropped."""

    retain = False


LONG = settings(max_examples=examples(60), stateful_step_count=30, deadline=None)
TestRules = Rules.TestCase
TestRules.settings = LONG
TestRulesWithoutRetaining = RulesWithoutRetaining.TestCase
TestRulesWithoutRetaining.settings = LONG
