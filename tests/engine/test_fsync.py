"""A flush begins when every earlier write has ended, and needs no later one."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ..support.memory import page_aligned

Faulty = Callable[..., Any]
BLOCK = page_aligned(b"x" * 65536)


def positions(journal: Any, event: str, kind: str) -> list[int]:
    return [at for at, (what, of, *_) in enumerate(journal.entries()) if (what, of) == (event, kind)]


@pytest.mark.parametrize("threads", [1, 3])
def test_a_flush_is_submitted_after_the_last_earlier_write_has_completed(
    faulty: Faulty, testing: ModuleType, backend: Any, drive: Path, threads: int
) -> None:
    journal = testing.Journal()
    engine = faulty(backend, num_threads=threads, journal=journal)
    for index in range(10):
        engine.write(BLOCK, drive / str(index))
    engine.fsync(drive / "0").result()
    assert max(positions(journal, "complete", "write")) < min(positions(journal, "submit", "sync"))


def test_a_flush_begins_once_the_earlier_writes_have_ended_and_not_after_the_later_ones(
    faulty: Faulty, testing: ModuleType, gate: Any, drive: Path
) -> None:
    journal = testing.Journal()
    engine = faulty("threads", queue_depth=2, gate=gate, journal=journal)
    engine.write(BLOCK, drive / "file")
    flushed = engine.fsync(drive / "file")
    for index in range(100):
        engine.write(BLOCK, drive / "file", (index + 1) * 65536)
    gate.release()
    flushed.result()
    engine.close()
    assert positions(journal, "submit", "sync")[0] < max(positions(journal, "submit", "write"))


def test_two_flushes_each_wait_for_their_own_writes(faulty: Faulty, testing: ModuleType, drive: Path) -> None:
    journal = testing.Journal()
    engine = faulty("threads", num_threads=2, journal=journal)
    engine.write(BLOCK, drive / "file").result()
    first = engine.fsync(drive / "file")
    engine.write(BLOCK, drive / "file", 65536)
    second = engine.fsync(drive / "file")
    assert (first.result(), second.result()) == (0, 0)
    assert max(positions(journal, "complete", "write")) < max(positions(journal, "submit", "sync"))


def test_a_flush_after_a_write_that_failed_still_happens(faulty: Faulty, drive: Path) -> None:
    engine = faulty("threads", error_every=1, error_limit=1)
    failed = engine.write(BLOCK, drive / "file")
    assert engine.fsync(drive / "file").result() == 0
    assert failed.exception() is not None


def test_a_flush_that_fails_says_of_which_file(faulty: Faulty, backend: Any, drive: Path) -> None:
    (drive / "file").touch()
    engine = faulty(backend, error_every=1, error=errno.EIO)
    with pytest.raises(OSError, match="fsync") as caught:
        engine.fsync(drive / "file").result()
    assert (caught.value.errno, caught.value.filename) == (errno.EIO, str(drive / "file"))
