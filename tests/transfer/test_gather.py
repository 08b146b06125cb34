"""Chunks are used in turn, and never again before the transfers with them have ended."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from deepnvme.memory.alignment import PAGE
from deepnvme.memory.pool import BufferPool, OutOfBuffers
from deepnvme.transfer.gather import CHUNK, ChunkRing, Transfers


class TestFailures:
    def test_no_memory_and_no_waiting(self) -> None:
        ring = ChunkRing(BufferPool(0), CHUNK, wait=False)
        assert ring.lease() is None
        assert ring.memory(0, 1) is None

    def test_no_memory_that_waiting_could_bring(self) -> None:
        with pytest.raises(OutOfBuffers):
            ChunkRing(BufferPool(0), CHUNK, wait=True).lease()

    def test_the_first_error_is_that_of_all(self, drive: Path, faulty: Any) -> None:
        engine = faulty("threads", error_every=1)
        with engine.open(str(drive / "file"), "w+") as file:
            failed = engine.write(torch.zeros(10), file, 0)
            transfers = Transfers([failed])
            assert str(transfers.exception()) == str(failed.exception())
        assert transfers.done()


def test_transfers_are_waited_for_only_if_there_are_too_many(drive: Path, faulty: Any, gate: Any) -> None:
    gate.hold()
    engine = faulty("threads", gate=gate)
    ended: list[int] = []
    transfers = Transfers(ended=ended.append)
    opener = threading.Timer(0.1, gate.release)
    with engine.open(str(drive / "file"), "w+") as file:
        for nbytes in (1, 2, 3):
            transfers.start(engine.write, torch.zeros(nbytes, dtype=torch.uint8), file, 0)
        transfers.take_ended()
        transfers.take_ended(most=3)
        assert ended == []
        opener.start()
        transfers.take_ended(most=2)
        assert ended[:1] == [1]
        transfers.result()
        opener.join()
    assert ended == [1, 2, 3]


@pytest.mark.parametrize("budget", [1, 2, 9])
def test_at_most_four_chunks_and_no_more_than_the_pool_has(budget: int) -> None:
    pool = BufferPool(budget * CHUNK)
    ring = ChunkRing(pool, CHUNK, wait=True)
    chunks = [chunk for _ in range(6) if (chunk := ring.lease()) is not None]
    assert len(chunks) == min(budget, 4)
    assert pool.in_use == len(chunks) * CHUNK
    ring.release()
    ring.release()
    del chunks
    assert pool.in_use == 0


def test_memory_lies_in_its_page_as_its_place_in_the_file() -> None:
    ring = ChunkRing(BufferPool(CHUNK), CHUNK, wait=True)
    for begin, end in [(3, 10), (PAGE + 5, 2 * PAGE), (7, 8), (0, CHUNK - 3 * PAGE)]:
        memory = ring.memory(begin, end)
        assert memory is not None
        assert memory.data_ptr() % PAGE == begin % PAGE
        assert memory.nbytes == end - begin


def test_a_chunk_is_used_again_when_its_writes_have_ended(drive: Path, faulty: Any, gate: Any) -> None:
    gate.release()
    engine = faulty("threads", gate=gate)
    pool = BufferPool(CHUNK)
    ring = ChunkRing(pool, CHUNK, wait=True)
    with engine.open(str(drive / "file"), "w+") as file:
        gate.hold()
        first = ring.memory(0, CHUNK)
        assert first is not None
        first.fill_(7)
        ring.sent([engine.write(first, file, 0)])
        opener = threading.Timer(0.1, gate.release)
        opener.start()
        second = ring.memory(0, CHUNK)
        assert second is not None
        assert second.data_ptr() == first.data_ptr()
        second.zero_()
        ring.release()
        opener.join()
    assert (drive / "file").read_bytes() == b"\7" * CHUNK
