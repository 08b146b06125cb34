"""How long blocks took: each in its bin, once, whatever it went through."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import deepnvme

from ..support.memory import Guarded, page_aligned, pattern

MIB = 1 << 20
CONTENT = pattern(100_001)  # 24 pages and a tail: 7 blocks of 16 KiB
Faulty = Callable[..., Any]


def shortest(longest_in_bin: int) -> float:
    """The least that a block in this bin can have taken."""
    return longest_in_bin / 1.125


@given(nanoseconds=st.integers(0, 2**64 - 1) | st.integers(0, 64).map(lambda bits: 2**bits - 1))
def test_a_duration_is_within_the_ends_of_its_bin(testing: ModuleType, nanoseconds: int) -> None:
    index = testing.latency_bin(nanoseconds)
    assert nanoseconds <= testing.longest_in_bin(index)
    assert index == 0 or nanoseconds > testing.longest_in_bin(index - 1)


def test_bins_ascend_and_are_at_most_an_eighth_wide(testing: ModuleType) -> None:
    first = 0
    for index in range(testing.latency_bins):
        longest = testing.longest_in_bin(index)
        assert longest >= first
        assert longest - first <= first / 8
        first = longest + 1
    assert testing.longest_in_bin(0) < 1_000
    assert first > 3_600 * 10**9


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("misalignment", [0, 1])
def test_every_block_is_in_one_bin(drive: Path, backend: Any, threads: int, misalignment: int) -> None:
    tensor = Guarded(bytes(MIB), misalignment).tensor
    with deepnvme.Engine(backend=backend, block_size=65536, num_threads=threads) as engine:
        engine.write(tensor, drive / "file", 100).result()
        written = engine.stats()
        engine.read(tensor, drive / "file", 100).result()
    both = engine.stats()  # the workers have gone, their figures have not
    for stats, blocks in ((written, 18), (both, 36)):  # two of them the ends
        assert (sum(stats.block_latency.values()), stats.blocks) == (blocks, blocks)


def test_bins_are_given_in_order_and_only_where_they_hold_something(
    testing: ModuleType, drive: Path, engine: deepnvme.Engine
) -> None:
    for size in (1, 4096, 32 * MIB):
        engine.write(page_aligned(bytes(size)), drive / "file").result()
    block_latency = engine.stats().block_latency
    assert list(block_latency) == sorted(block_latency)
    assert 0 not in block_latency.values()
    assert set(block_latency) <= {testing.longest_in_bin(index) for index in range(testing.latency_bins)}


def test_the_handle_tells_it_too(handle: Any, drive: Path) -> None:
    handle.sync_pwrite(torch.zeros(3 * MIB, dtype=torch.uint8), str(drive / "file"))
    stats = handle.stats()
    assert sum(stats["block_latency"].values()) == stats["blocks"] >= 3


def test_no_block_took_longer_than_its_request(drive: Path, backend: Any) -> None:
    with deepnvme.Engine(backend=backend) as engine:
        begin = time.monotonic_ns()
        engine.write(page_aligned(bytes(8 * MIB)), drive / "file").result()
        took = time.monotonic_ns() - begin
        assert 0 < shortest(max(engine.stats().block_latency)) <= took


def test_a_completion_that_is_late_shows(testing: ModuleType, faulty: Faulty, backend: Any, gate: Any, drive: Path) -> None:
    journal = testing.Journal()
    engine = faulty(backend, gate=gate, journal=journal)
    begin = time.monotonic_ns()
    future = engine.write(page_aligned(bytes(4 * 4096)), drive / "file")
    while len(journal.entries()) < 4:
        time.sleep(0.001)
    time.sleep(0.05)
    gate.release()
    future.result()
    took = time.monotonic_ns() - begin
    block_latency = engine.stats()["block_latency"]
    assert sum(block_latency.values()) == 4
    assert min(block_latency) >= 50_000_000
    assert shortest(max(block_latency)) <= took


@pytest.mark.alone
def test_the_wait_for_a_place_in_the_queue_is_not_counted(
    testing: ModuleType, faulty: Faulty, backend: Any, gate: Any, drive: Path
) -> None:
    journal = testing.Journal()
    engine = faulty(backend, queue_depth=1, gate=gate, journal=journal)
    future = engine.write(page_aligned(bytes(2 * 4096)), drive / "file")
    while not journal.entries():
        time.sleep(0.001)
    time.sleep(0.2)
    begin = time.monotonic_ns()
    gate.release()
    future.result()
    took = time.monotonic_ns() - begin
    bins = sorted(engine.stats()["block_latency"])
    assert shortest(bins[0]) <= took  # which a busy machine may make longer than what the first one waited
    assert bins[-1] >= 200_000_000


def test_a_flush_is_not_a_block(drive: Path, backend: Any) -> None:
    with deepnvme.Engine(backend=backend) as engine:
        engine.write(page_aligned(bytes(4096)), drive / "file").result()
        before = engine.stats()
        engine.fsync(drive / "file").result()
        after = engine.stats()
    assert (after.requests, after.blocks, after.block_latency) == (2, 1, before.block_latency)


@pytest.mark.filterwarnings("ignore:transfers of")
@pytest.mark.parametrize("faults", [
    {"error_every": 2, "error": errno.EAGAIN},
    {"error_every": 3, "error": errno.EINTR},
    {"short_every": 2, "short_bytes": 4096},
    {"short_every": 3, "short_bytes": 1},
    {"refuse_every": 2},
    {"refuse_direct": True},
], ids=str)  # fmt: skip
def test_a_block_that_takes_several_attempts_is_counted_once(
    faulty: Faulty, backend: Any, drive: Path, faults: dict[str, int]
) -> None:
    engine = faulty(backend, block_size=16384, **faults)
    engine.write(page_aligned(CONTENT), drive / "file").result()
    stats = engine.stats()
    assert (sum(stats["block_latency"].values()), stats["blocks"]) == (7, 7)


def test_the_time_of_a_block_includes_all_of_its_attempts(faulty: Faulty, backend: Any, drive: Path) -> None:
    engine = faulty(backend, error_every=1, error=errno.EAGAIN, error_limit=20)
    engine.write(page_aligned(bytes(4096)), drive / "file").result()
    assert engine.stats()["retries"] == 20
    assert min(engine.stats()["block_latency"]) >= 12_000_000  # the worker pauses for 1 ms after each but the first eight


def test_blocks_that_fail_are_not_counted(faulty: Faulty, backend: Any, drive: Path) -> None:
    engine = faulty(backend, error_every=3, error=errno.EIO)
    futures = [engine.write(page_aligned(bytes(4096)), drive / str(index)) for index in range(9)]
    assert len([future for future in futures if future.exception()]) == 3
    assert sum(engine.stats()["block_latency"].values()) == 6
