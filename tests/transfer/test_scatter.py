"""Runs hold each piece once, are as few as allowed, and are read in order."""

from __future__ import annotations

import errno
import itertools
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepnvme import Engine
from deepnvme.memory.alignment import PAGE
from deepnvme.memory.pool import BufferPool
from deepnvme.memory.tensor_bytes import memory_of
from deepnvme.transfer.gather import CHUNK
from deepnvme.transfer.scatter import runs, transfer_ahead

from ..support.memory import pattern

LIMIT = 64 << 10
PLACES = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 1 << 20), st.integers(0, LIMIT)), max_size=40)


@settings(max_examples=60, deadline=None)
@given(places=PLACES, gap=st.sampled_from([0, 1, PAGE, LIMIT]), alignment=st.sampled_from([1, 512, PAGE]))
def test_each_piece_is_in_one_run(places: list[tuple[int, int, int]], gap: int, alignment: int) -> None:
    found = list(runs(places, LIMIT, alignment, gap))
    assert sorted(index for run in found for index in run.members) == list(range(len(places)))
    for run in found:
        files = {places[index][0] for index in run.members}
        assert len(files) == 1
        assert run.begin % alignment == run.end % alignment == 0
        assert run.end - run.begin <= LIMIT or len(run.members) == 1
        assert all(run.begin <= places[index][1] and sum(places[index][1:]) <= run.end for index in run.members)
    for one, other in itertools.pairwise(found):
        first = places[other.members[0]]
        if places[one.members[0]][0] == first[0]:
            assert first[1] - one.end > gap or max(one.end, sum(first[1:])) - one.begin > LIMIT - alignment


def test_neighbours_are_one_run() -> None:
    places = [(0, index * PAGE, PAGE) for index in range(10)]
    assert [(run.begin, run.end) for run in runs(places, LIMIT, PAGE)] == [(0, 10 * PAGE)]
    assert len(list(runs(places, 4 * PAGE, PAGE))) == 3


@pytest.mark.parametrize("budget", [1, 3, 9])
def test_ranges_come_in_order_with_their_bytes(drive: Path, engine: Engine, budget: int) -> None:
    data = pattern(2 * CHUNK)
    (drive / "file").write_bytes(data)
    pool = BufferPool(budget * CHUNK)
    ranges = [(at, 1000) for at in range(0, len(data) - 1000, 500_000)]
    seen = []
    with engine.open(drive / "file", "r") as file:
        for (at, nbytes), chunk in transfer_ahead(ranges, lambda each, chunk: engine.read(chunk[: each[1]], file, each[0]), pool):
            assert memory_of(chunk, 0, nbytes) == data[at : at + nbytes]
            seen.append((at, nbytes))
    assert seen == ranges
    del chunk
    assert pool.in_use == 0


def test_one_who_stops_early_leaves_nothing_under_way(drive: Path, engine: Engine) -> None:
    (drive / "file").write_bytes(bytes(CHUNK))
    pool = BufferPool(4 * CHUNK)
    with engine.open(drive / "file", "r") as file:
        ahead = transfer_ahead(range(10), lambda at, chunk: engine.read(chunk[:PAGE], file, at * PAGE), pool)
        assert next(ahead)[0] == 0
        ahead.close()
    assert pool.in_use == 0


def test_an_error_of_the_drive_leaves_nothing_under_way(drive: Path, faulty: Any) -> None:
    (drive / "file").write_bytes(bytes(CHUNK))
    pool, engine = BufferPool(4 * CHUNK), faulty("threads", error_every=1)
    with engine.open(str(drive / "file"), "r") as file, pytest.raises(OSError, match="read") as failed:
        list(transfer_ahead(range(10), lambda at, chunk: engine.read(chunk[:PAGE], file, at * PAGE), pool))
    assert failed.value.errno == errno.EIO
    del failed
    assert pool.in_use == 0
