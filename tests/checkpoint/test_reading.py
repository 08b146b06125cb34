"""Storages hold what the file has at their offsets, wherever those are."""

from __future__ import annotations

import errno
import math
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deepnvme import Engine
from deepnvme.checkpoint import file_io
from deepnvme.checkpoint.file_io import FileSlice, memory_for, read, read_small_pieces, started
from deepnvme.checkpoint.formats.pt_records import CorruptCheckpoint
from deepnvme.memory import host
from deepnvme.memory.alignment import PAGE
from deepnvme.memory.pool import BufferPool
from deepnvme.memory.tensor_bytes import flat_bytes, memory_of
from deepnvme.transfer.gather import CHUNK, DIRECT_FROM

from ..support.examples import examples
from ..support.memory import bytes_of as content_of
from ..support.memory import pattern

SIZE = 9 << 20
CONTENT = pattern(SIZE)


@pytest.fixture
def path(drive: Path) -> Path:
    (drive / "file").write_bytes(CONTENT)
    return drive / "file"


def placed_at(*places: tuple[int, int]) -> list[FileSlice]:
    """(offset, bytes) of each."""
    return [FileSlice(offset, memory_for(nbytes, offset)) for offset, nbytes in places]


def assert_read(placed: list[FileSlice]) -> None:
    for each in placed:
        expected = bytearray(CONTENT[each.offset : each.offset + each.nbytes])
        assert torch.equal(flat_bytes(each.memory), torch.frombuffer(expected, dtype=torch.uint8))


class TestFailures:
    def test_a_file_cut_off_is_damage_also_if_it_is_whole_again(
        self, path: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Somebody else is writing it anew."""
        refuse = engine.read

        def read_and_rewrite(*arguments: Any) -> Any:
            try:
                return refuse(*arguments)
            finally:
                path.write_bytes(CONTENT)

        monkeypatch.setattr(engine, "read", read_and_rewrite)
        os.truncate(path, 0)
        with engine.open(path, "r") as file, pytest.raises(CorruptCheckpoint, match="past the end of"):
            started(engine, torch.empty(100), file, 4096)

    @pytest.mark.parametrize("places", [[(0, 100)], [(0, 2 * DIRECT_FROM), (3 * DIRECT_FROM, 100)]], ids=["small", "both"])
    def test_an_error_of_the_drive_is_raised(self, path: Path, faulty: Callable[..., Any], places: list[tuple[int, int]]) -> None:
        pool = BufferPool(16 << 20)
        with pytest.raises(OSError, match="read") as failed:
            read(placed_at(*places), path, faulty("threads", error_every=1), pool)
        assert failed.value.errno == errno.EIO
        del failed  # and what its frames hold
        assert pool.in_use == 0


@pytest.mark.parametrize("huge", ["huge pages", "ordinary pages", "ordinary pages later"])
@pytest.mark.parametrize("nbytes", [SIZE - 5, 5 << 20, (4 << 20) + 1])
def test_a_tensor_is_read_on_the_pages_that_come_fast(
    path: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch, huge: str, nbytes: int
) -> None:
    answers = {"huge pages": [True] * 9, "ordinary pages": [False] * 9, "ordinary pages later": [True, *[False] * 9]}[huge]
    following = iter(answers)
    monkeypatch.setattr(file_io, "populate_huge_pages", lambda address, nbytes: next(following))
    told: list[tuple[int, int]] = []
    placed = placed_at((5, nbytes), (SIZE - 100, 100), (PAGE, DIRECT_FROM))
    pool = BufferPool(16 << 20)
    read(placed, path, engine, pool, lambda done, total: told.append((done, total)))
    assert_read(placed)
    assert told == sorted(told)
    assert told[-1] == (nbytes + 100 + DIRECT_FROM,) * 2
    assert pool.in_use == 0


@pytest.mark.parametrize("slow", [False, True], ids=["huge", "ordinary"])
@pytest.mark.parametrize("seed", range(8))
def test_pieces_at_any_places_are_read(
    path: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch, seed: int, slow: bool
) -> None:
    monkeypatch.setattr(host, "_slow_until", math.inf if slow else 0.0)
    rng = random.Random(seed)
    places, at = [], rng.choice((0, 5, PAGE))
    while True:
        nbytes = rng.choice((1, 7, 4096, 16_384, 100_001, DIRECT_FROM - 1, DIRECT_FROM, DIRECT_FROM + 4099))
        if at + nbytes > SIZE:
            break
        places.append((at, nbytes))
        at += nbytes + rng.choice((0, 1, 63, PAGE, 100_000))
    rng.shuffle(places)
    told: list[tuple[int, int]] = []
    placed = placed_at(*places)
    read(placed, path, engine, BufferPool(16 << 20), lambda done, total: told.append((done, total)))
    assert_read(placed)
    assert told[-1] == (sum(nbytes for _, nbytes in places),) * 2


@pytest.mark.parametrize("budget", [CHUNK, 2 * CHUNK])
def test_less_memory_is_enough(path: Path, engine: Engine, budget: int) -> None:
    placed = placed_at(*((offset, 1000) for offset in range(0, SIZE - 1000, 100_000)))
    pool = BufferPool(budget)
    read(placed, path, engine, pool)
    assert_read(placed)
    assert pool.in_use == 0


@pytest.mark.parametrize("nbytes", [0, 1, DIRECT_FROM, DIRECT_FROM + 7])
@pytest.mark.parametrize("offset", [0, 64, PAGE + 513])
def test_new_memory_is_as_far_behind_a_page_as_its_place_in_the_file(nbytes: int, offset: int) -> None:
    storage = memory_for(nbytes, offset)
    assert storage.nbytes() == nbytes
    if nbytes >= DIRECT_FROM:
        assert storage.data_ptr() % PAGE == offset % PAGE
        assert content_of(flat_bytes(storage)[:10]) == bytes(10)


FILE = 300_000  # bytes


@settings(max_examples=examples(30), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    pieces=st.lists(
        st.builds(lambda at, n: (at, min(n, FILE - at)), st.integers(0, FILE - 1), st.integers(0, FILE)), max_size=12
    ),
    budget=st.sampled_from([CHUNK, 8 * CHUNK]),
)
def test_each_piece_is_in_its_chunk_however_they_overlap(
    engine: Engine, drive: Path, pieces: list[tuple[int, int]], budget: int
) -> None:
    data = os.urandom(FILE)
    (drive / "file").write_bytes(data)
    pool = BufferPool(budget)
    lease = pool.lease(CHUNK)  # which is leased again below, and has nothing of the file
    lease.buffer.zero_()
    lease.release()
    found = []
    with engine.open(drive / "file") as file:
        for run, chunk, begin in read_small_pieces(pieces, file, engine, pool):
            for offset, nbytes in (pieces[index] for index in run):
                assert memory_of(chunk, offset - begin, nbytes) == data[offset:][:nbytes]
            found += run
    assert sorted(found) == list(range(len(pieces)))
