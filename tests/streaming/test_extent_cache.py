"""Extents are in memory when they are used, read ahead where there is room, and nothing is overwritten while somebody sees it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from deepnvme.streaming.extent_cache import ExtentCache
from deepnvme.streaming.extent_memory import PinnedSlots
from deepnvme.swap import OutOfBuffers

from ..support.drives import CountedSlots, FakeDrive, content
from ..support.examples import examples

NBYTES = 8192
KEYS = "abcdefgh"


@pytest.fixture
def fake() -> FakeDrive:
    return FakeDrive()


def cache_of(fake: FakeDrive, slots: int = 3, residents: str = "", keys: str = KEYS) -> ExtentCache:
    return ExtentCache(fake.read, dict.fromkeys(keys, NBYTES), CountedSlots(slots * NBYTES), residents)


def is_right(key: str, memory: torch.Tensor) -> bool:
    return bool(torch.equal(memory, content(key, NBYTES)))


def pass_over(cache: ExtentCache, keys: str, following: str = "") -> Iterator[str]:
    """Use each in turn, with what comes after it expected."""
    for index, key in enumerate(keys):
        assert is_right(key, cache.acquire([key], keys[index + 1 :] + following)[0])
        yield key
        cache.release([key])


def test_an_error_that_ended_a_read_before_it_was_wanted_is_old(fake: FakeDrive) -> None:
    cache = cache_of(fake, residents="c")
    fake.failing = {"b", "c"}
    cache.acquire(["a"], "bc")
    fake.end()
    fake.failing = set()
    assert is_right("b", cache.acquire(["b"], "c")[0])
    assert is_right("c", cache.acquire(["c"])[0])


@pytest.mark.parametrize("residents", ["", "b"])
def test_an_error_of_reading_ahead_is_not_raised_once_the_fault_is_mended(fake: FakeDrive, residents: str) -> None:
    cache = cache_of(fake, residents=residents)
    fake.failing = {"b", "c"}
    cache.acquire(["a"], "bc")
    fake.failing = {"c"}
    assert is_right("b", cache.acquire(["b"], "c")[0])  # whose read, begun before, ends with its error only now
    with pytest.raises(OSError, match="failed c"):
        cache.acquire(["c"])
    fake.failing = set()
    assert is_right("c", cache.acquire(["c"])[0])
    assert fake.begun == [*"abcbcc"]


def test_an_interrupted_acquire_leaves_no_use_behind(fake: FakeDrive, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = cache_of(fake, slots=1)

    def interrupted(reading: object, timeout: float | None = None) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("tests.support.drives.FakeReading.exception", interrupted)
        with pytest.raises(KeyboardInterrupt):
            cache.acquire(["a"])
    fake.end()
    assert [*pass_over(cache, "bab")] == [*"bab"]


@pytest.mark.parametrize("slots", [1, 2, 3, 5])
def test_reads_begin_before_anything_waits_and_are_as_many_as_there_are_slots(fake: FakeDrive, slots: int) -> None:
    cache = cache_of(fake, slots)
    for index, _ in enumerate(pass_over(cache, KEYS)):
        assert fake.begun == [*KEYS[: index + slots]]
    assert fake.waited_for[0] == "a"


def test_what_was_expected_wrongly_is_not_waited_for_and_its_slots_are_read_into_as_they_come_free(fake: FakeDrive) -> None:
    cache = cache_of(fake)
    cache.expect("ab")
    cache.acquire(["c"], "de")
    assert fake.waited_for[0] == "c"
    assert fake.begun == ["a", "b", "c", "d", "e"]


def test_what_somebody_changed_is_read_again(fake: FakeDrive) -> None:
    cache = cache_of(fake, residents="b")
    for key in "ab":
        (memory,) = cache.acquire([key], key)
        memory.zero_()
        cache.release([key], changed=True)
        assert is_right(key, cache.acquire([key], key)[0])


def test_the_drive_has_work_while_residents_are_used(fake: FakeDrive) -> None:
    """Those that are there already take no room among what is expected."""
    cache = cache_of(fake, residents="bcde")
    for _ in pass_over(cache, "abcdefgh"):
        pass
    fake.begun.clear()
    cache.acquire(["a"], "bcdefgh")
    assert fake.begun == ["a", "f", "g"]


def test_more_in_use_than_slots_have_more_for_as_long(fake: FakeDrive) -> None:
    slots = CountedSlots(2 * NBYTES)
    cache = ExtentCache(fake.read, dict.fromkeys(KEYS, NBYTES), slots)
    memories = [cache.acquire([key], "gh")[0] for key in "abcd"]
    assert all(map(is_right, "abcd", memories))
    assert slots.most == 4 * NBYTES
    cache.release("abcd")
    del memories
    slots.most = 0
    for _ in pass_over(cache, KEYS):
        pass
    assert slots.most == 2 * NBYTES


def test_smaller_extents_are_read_further_ahead(fake: FakeDrive) -> None:
    """As many as there is room for beside what is in use; the largest waits for its room, and nothing overtakes it."""
    sizes = dict.fromkeys("acdef", NBYTES) | {"B": 3 * NBYTES}
    slots = CountedSlots(6 * NBYTES)
    cache = ExtentCache(fake.read, sizes, slots)
    order = "acdefBacdefB"
    begun = []
    for index, key in enumerate(order):
        cache.acquire([key], order[index + 1 :])
        begun.append("".join(fake.begun))
        cache.release([key])
    assert begun[:6] == ["acdef", "acdef", "acdef", "acdefBa", "acdefBac", "acdefBacd"]
    assert "".join(fake.begun) == order
    assert slots.most <= 6 * NBYTES


def test_what_is_on_its_way_stays_while_residents_are_used(fake: FakeDrive) -> None:
    sizes = dict.fromkeys("abcde", NBYTES) | {"L": 3 * NBYTES}
    cache = ExtentCache(fake.read, sizes, CountedSlots(4 * NBYTES), residents="b")
    cache.expect("bacdeL")
    cache.acquire(["a"], "bcdeL")
    cache.release(["a"])
    cache.acquire(["b"], "cdeL")
    cache.release(["b"])
    for _ in pass_over(cache, "cde"):
        pass
    assert sorted(fake.begun) == [*"abcde"]


def test_a_slot_is_as_large_as_was_asked_for_and_lies_where_there_is_room() -> None:
    slots = PinnedSlots(4 * 4096)
    first, second, third = (slots.lease(nbytes) for nbytes in (4096, 5000, 10))
    assert first is not None
    assert second is not None
    assert third is not None
    assert [slot.buffer.nbytes for slot in (first, second, third)] == [4096, 5000, 10]
    assert slots.lease(1) is None
    second.release()
    fourth = slots.lease(8192)
    assert fourth is not None
    assert fourth.buffer.data_ptr() == first.buffer.data_ptr() + 4096
    with pytest.raises(ValueError, match="the slot was released"):
        second.buffer.fill_(0)
    beyond = slots.lease(4096, limit=5 * 4096)
    assert beyond is not None
    assert slots.lease(1, limit=5 * 4096) is None
    assert slots.in_use == 5 * 4096


def test_one_slot_more_serves_where_somebody_keeps_all_and_then_there_is_none(fake: FakeDrive) -> None:
    cache = cache_of(fake, slots=1)
    kept = []
    for key in "ab":
        kept += cache.acquire([key])
        cache.release([key])
    with pytest.raises(OutOfBuffers, match=r"'c'.*views are kept of all 16384 bytes"):
        cache.acquire(["c"])
    kept.pop()
    assert is_right("c", cache.acquire(["c"])[0])


class Rules(RuleBasedStateMachine):
    """Whatever is acquired, expected, released, kept and broken, in whatever order."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr("deepnvme.streaming.extent_memory.VIEW_DROP_WAIT_SECONDS", 0.01)  # nobody is on the way out
        self.fake = FakeDrive()
        self.residents = "ab"
        self.slots = CountedSlots(3 * NBYTES)
        self.cache = ExtentCache(self.fake.read, dict.fromkeys(KEYS, NBYTES), self.slots, self.residents)
        self.in_use: list[tuple[str, torch.Tensor]] = []
        self.kept: list[tuple[str, torch.Tensor]] = []

    @rule(keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=3, unique=True), then=st.text(KEYS, max_size=6))
    def acquire(self, keys: list[str], then: str) -> None:
        begun = len(self.fake.begun)
        broken = self.fake.failing | self.fake.refusing | {reading.key for reading in self.fake.under_way if reading.error}
        try:
            memories = self.cache.acquire(keys, then)
        except OSError:
            assert broken.intersection(keys)
        except OutOfBuffers:
            assert self.kept
        else:
            self.in_use += zip(keys, memories, strict=True)
            assert all(map(is_right, keys, memories))
            ahead = [key for key in self.fake.begun[begun:] if key not in keys]
            assert set(ahead) <= set(then)
            assert len(ahead) <= 2

    @rule(keys=st.text(KEYS, max_size=6))
    def expect(self, keys: str) -> None:
        waited = list(self.fake.waited_for)
        self.cache.expect(keys)
        assert self.fake.waited_for == waited

    @precondition(lambda self: self.in_use)
    @rule(data=st.data(), keep=st.booleans())
    def release(self, data: st.DataObject, keep: bool) -> None:
        key, memory = self.in_use.pop(data.draw(st.integers(0, len(self.in_use) - 1)))
        assert is_right(key, memory)
        if keep and key not in self.residents and len(self.kept) < 2:
            self.kept.append((key, memory[:100]))
        del memory
        self.cache.release([key])

    @precondition(lambda self: self.kept)
    @rule()
    def drop(self) -> None:
        self.kept.pop()

    @rule(keys=st.sets(st.sampled_from(KEYS), max_size=2))
    def fail(self, keys: set[str]) -> None:
        self.fake.failing = keys

    @rule(keys=st.sets(st.sampled_from(KEYS), max_size=1))
    def refuse(self, keys: set[str]) -> None:
        self.fake.refusing = keys

    @rule(count=st.integers(1, 3))
    def time_passes(self, count: int) -> None:
        for reading in self.fake.under_way[:count]:
            self.fake.end(reading)

    @invariant()
    def what_is_seen_is_what_was_read(self) -> None:
        assert all(is_right(key, memory) for key, memory in self.in_use)
        assert all(torch.equal(memory, content(key, 100)) for key, memory in self.kept)

    @invariant()
    def slots_are_within_bounds(self) -> None:
        in_use = len({key for key, _ in self.in_use if key not in self.residents})
        assert self.slots.in_use <= (max(3, in_use + 2) + 2) * NBYTES

    def teardown(self) -> None:
        self.fake.failing = self.fake.refusing = set()
        self.fake.end()
        self.kept.clear()
        for key, _ in self.in_use:
            self.cache.release([key])
        self.in_use.clear()
        for _ in pass_over(self.cache, KEYS):  # it still works
            pass
        self.cache.close()
        assert self.slots.in_use == 0
        self.patch.undo()


TestRules = Rules.TestCase
TestRules.settings = settings(max_examples=examples(40), stateful_step_count=25, deadline=None)
