"""How long blocks took: each in its bin, once, whatever it went through."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ..support.memory import page_aligned, pattern

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
