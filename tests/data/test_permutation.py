"""The order of a global shuffle: a permutation, the same everywhere, and as good as random."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DistributedSampler

from deepnvme.data.order import EpochSampler, Permutation


def permuted(count: int, *key: int) -> list[int]:
    found: list[int] = Permutation(count, *key)(torch.arange(count)).tolist()
    return found


@given(count=st.integers(1, 3000), seed=st.integers(), epoch=st.integers(0, 1000))
def test_every_number_occurs_once(count: int, seed: int, epoch: int) -> None:
    assert sorted(permuted(count, seed, epoch)) == list(range(count))


@given(count=st.integers(1, 1 << 62), data=st.data())
def test_numbers_of_a_large_range_are_in_it_and_differ(count: int, data: st.DataObject) -> None:
    positions = data.draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=50, unique=True))
    found = Permutation(count, 3)(torch.tensor(positions)).tolist()
    assert len(set(found)) == len(positions)
    assert all(0 <= number < count for number in found)


def test_the_order_is_the_same_on_every_machine() -> None:
    """What this version has written down once: a resumed training depends on it."""
    assert permuted(10, 0, 0) == [2, 7, 1, 9, 6, 0, 8, 4, 5, 3]
    assert Permutation(10**9, 7, 1)(torch.tensor([0, 1, 10**9 - 1])).tolist() == [128406982, 67612193, 545102545]


def test_all_orders_of_three_numbers_are_as_frequent() -> None:
    counts = Counter(tuple(permuted(3, seed)) for seed in range(6000))
    assert len(counts) == 6
    assert sum((count - 1000) ** 2 / 1000 for count in counts.values()) < 25  # chi-square with 5 degrees: 1 of 7000 is above


@pytest.mark.parametrize("count", [5, 64, 100, 1000])
def test_a_number_is_as_often_at_every_tenth_of_the_order(count: int) -> None:
    tenths = torch.zeros(10)
    for seed in range(2000):
        tenths[permuted(count, seed).index(count // 2) * 10 // count] += 1
    expected = (
        torch.tensor([len(range(-(-count * each // 10), -(-count * (each + 1) // 10))) for each in range(10)]) * 2000 / count
    )
    there = expected > 0
    chi = ((tenths - expected)[there] ** 2 / expected[there]).sum()
    assert chi < 40  # 9 degrees at most: 1 of 100000 is above


def test_neighbours_in_the_order_are_no_neighbours_in_the_file() -> None:
    found = torch.tensor(permuted(100_000, 1))
    distances = (found[1:] - found[:-1]).abs()
    assert (distances == 1).sum() < 10  # 2 are expected
    assert 0.32 < distances.double().mean() / 100_000 < 0.35  # a third is expected


@given(samples=st.integers(0, 200), world=st.integers(1, 7), shuffle=st.booleans(), drop=st.booleans())
def test_ranks_have_the_samples_that_distributed_sampler_gives_them(samples: int, world: int, shuffle: bool, drop: bool) -> None:
    dataset = range(samples)
    ranks = [EpochSampler(dataset, shuffle, 5, rank, world, drop_last=drop) for rank in range(world)]
    numbers = [list(each) for each in ranks]
    assert [len(each) for each in ranks] == [len(each) for each in numbers]
    whole = [number for turn in zip(*numbers, strict=True) for number in turn]
    if drop:
        assert len(whole) == samples // world * world
        assert len(set(whole)) == len(whole)
    else:
        assert set(whole) == set(range(samples))
    if not shuffle and samples >= world:
        theirs = [list(DistributedSampler(list(dataset), world, rank, shuffle=False, drop_last=drop)) for rank in range(world)]
        assert numbers == theirs


@given(samples=st.integers(1, 300), start=st.integers(0, 300), epoch=st.integers(0, 5), size=st.integers(1, 400))
def test_an_order_begins_anywhere(samples: int, start: int, epoch: int, size: int) -> None:
    sampler = EpochSampler(range(samples), seed=9)
    sampler.set_epoch(epoch)
    batches, rest = [batch.tolist() for batch in sampler.batches(epoch, start, size)], list(sampler)[start:]
    assert batches == [rest[begin : begin + size] for begin in range(0, len(rest), size)]


def test_a_rank_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="rank=2 and world_size=2"):
        EpochSampler(range(5), rank=2, world_size=2)


def test_a_sampler_from_before_the_process_group_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise, each process would train with all samples."""
    before, chosen = EpochSampler(range(4), shuffle=False), EpochSampler(range(4), shuffle=False, rank=0, world_size=1)
    for name, value in (("is_initialized", True), ("get_world_size", 2), ("get_rank", 1)):
        monkeypatch.setattr(torch.distributed, name, lambda value=value: value)
    with pytest.raises(RuntimeError, match=r"made before torch\.distributed was initialised"):
        list(before)
    assert list(chosen) == [0, 1, 2, 3]
    assert list(EpochSampler(range(4), shuffle=False)) == [1, 3]


def test_a_billion_samples_take_no_memory() -> None:
    program = """
import resource, torch
from deepnvme.data import EpochSampler
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
sampler = EpochSampler(range(10**9), seed=1)
numbers = torch.cat(list(sampler.batches(0, 10**9 - 70_000, 1000)))
assert len(numbers.unique()) == 70_000
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert int(ran.stdout) < 64 << 10  # KiB
