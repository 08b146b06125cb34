"""How much is on its way to or from the drive at a time: of a misaligned tensor, and by ``in_flight_bytes``."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ..support.memory import Guarded
from ..support.patience import until

MIB = 1 << 20
KIB = 1 << 10
SIZE = 96 * MIB
Faulty = Callable[..., Any]


# operation, block size, queue depth, workers -> blocks of each worker that are under way before it waits for the first
@pytest.mark.parametrize(
    ("operation", "block_size", "queue_depth", "threads", "blocks"),
    [
        pytest.param("write", MIB, 128, 1, 64, id="writes take 64 MiB"),
        pytest.param("read", MIB, 128, 1, 8, id="reads take 8 MiB, which the cache keeps for their copy"),
        pytest.param("write", 64 * KIB, 1024, 1, 1024, id="writes of small blocks take as much"),
        pytest.param("read", 64 * KIB, 1024, 1, 128, id="reads of small blocks take as much"),
        pytest.param("write", 2 * MIB, 128, 1, 64, id="blocks larger than a slot are cut to its size"),
        pytest.param("write", MIB, 8, 1, 8, id="writes take no more than the queue depth"),
        pytest.param("read", MIB, 4, 1, 2, id="reads take half of what writes may, if that is less"),
        pytest.param("write", MIB, 128, 16, 4, id="all workers together take 64 MiB for writes"),
    ],
)
def test_a_misaligned_tensor_keeps_the_drive_as_busy_as_its_staging_allows(
    faulty: Faulty,
    testing: ModuleType,
    gate: Any,
    drive: Path,
    operation: str,
    block_size: int,
    queue_depth: int,
    threads: int,
    blocks: int,
) -> None:
    tensor = Guarded(bytes(SIZE), 1).tensor
    (drive / "file").touch()
    os.truncate(drive / "file", SIZE)
    journal = testing.Journal()
    engine = faulty("threads", block_size=block_size, queue_depth=queue_depth, num_threads=threads, gate=gate, journal=journal)
    future = getattr(engine, operation)(tensor, drive / "file")
    until(lambda: len(journal.entries()) >= blocks * threads)
    gate.release()
    future.result()
    assert most_under_way(journal) == blocks * threads


# operation sizes -> transfers that are under way before the worker waits for the first
@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        pytest.param([MIB], 2, id="blocks of full size are as few as their bytes allow"),
        pytest.param([4 * KIB] * 64, 32, id="small transfers are as many as the queue is deep"),
    ],
)
def test_bytes_in_flight_limit_a_worker(
    faulty: Faulty, testing: ModuleType, gate: Any, drive: Path, sizes: list[int], expected: int
) -> None:
    journal = testing.Journal()
    engine = faulty("threads", block_size=64 * KIB, queue_depth=32, in_flight_bytes=128 * KIB, gate=gate, journal=journal)
    tensors = [Guarded(bytes(size)).tensor for size in sizes]
    futures = [engine.write(tensor, drive / f"file {number}") for number, tensor in enumerate(tensors)]
    until(lambda: len(journal.entries()) >= expected)
    gate.release()
    assert [future.result() for future in futures] == sizes
    assert most_under_way(journal) == expected


def test_blocks_that_are_smaller_than_a_sector_of_the_drive_do_not_make_the_queue_less_deep(
    faulty: Faulty, testing: ModuleType, gate: Any, drive: Path
) -> None:
    journal = testing.Journal()
    engine = faulty("threads", block_size=512, queue_depth=8, gate=gate, journal=journal)
    future = engine.write(Guarded(bytes(MIB)).tensor, drive / "file")
    until(lambda: len(journal.entries()) >= 8)
    gate.release()
    assert future.result() == MIB
    assert most_under_way(journal) == 8


def most_under_way(journal: Any) -> int:
    under_way = most = 0
    for event, *_ in journal.entries():
        under_way += 1 if event == "submit" else -1
        most = max(most, under_way)
    return most
