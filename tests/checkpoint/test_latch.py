"""Waiting for something that happens once."""

from __future__ import annotations

import threading
import tracemalloc

from deepnvme._interrupts import Latch


def test_all_who_wait_go_on() -> None:
    latch = Latch()
    results: list[bool] = []
    threads = [threading.Thread(target=lambda: results.append(latch.wait(30))) for _ in range(5)]
    for thread in threads:
        thread.start()
    latch.set()
    for thread in threads:
        thread.join()
    assert results == [True] * 5
    assert latch.wait(0)


def test_polling_leaves_nothing_behind() -> None:
    latch = Latch()
    tracemalloc.start()
    try:
        assert not latch.wait(0)
        before, _ = tracemalloc.get_traced_memory()
        for _ in range(1000):
            assert not latch.wait(0)
        assert tracemalloc.get_traced_memory()[0] - before < 1000  # bytes: less than one for each
    finally:
        tracemalloc.stop()
