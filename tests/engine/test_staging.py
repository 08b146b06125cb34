"""How much of a misaligned tensor is on its way to or from the drive at a time."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ..support.memory import Guarded

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
    deadline = time.monotonic() + 60
    while len(journal.entries()) < blocks * threads and time.monotonic() < deadline:
        time.sleep(0.001)
    gate.release()
    future.result()
    assert most_under_way(journal) == blocks * threads


def most_under_way(journal: Any) -> int:
    under_way = most = 0
    for event, *_ in journal.entries():
        under_way += 1 if event == "submit" else -1
        most = max(most, under_way)
    return most
