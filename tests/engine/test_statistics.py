"""Figures that add up, byte by byte, for transfers whose way is known."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

import deepnvme

from ..support.memory import Guarded, page_aligned

MIB = 1 << 20


def moved(stats: deepnvme.Stats) -> dict[str, int]:
    return {
        name: getattr(stats, name)
        for name in ("bytes_read", "bytes_written", "bytes_zero_copy", "bytes_staged", "bytes_buffered", "blocks")
    }


# size, misalignment of the memory, offset -> zero copy, staged, buffered, blocks of 64 KiB
WAYS = {
    "aligned": (MIB, 0, 0, MIB, 0, 0, 16),
    "memory askew": (MIB, 1, 0, 0, MIB, 0, 16),
    "offset askew": (MIB, 0, 100, 0, MIB - 4096, 4096, 18),
    "both askew by the same": (MIB, 100, 100, MIB - 4096, 0, 4096, 18),
    "one byte more": (MIB + 1, 0, 0, MIB, 0, 1, 17),
    "small": (100, 0, 0, 0, 0, 100, 1),
    "nothing": (0, 0, 0, 0, 0, 0, 0),
}


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("way", WAYS)
def test_every_byte_is_counted_on_its_way(drive: Path, backend: Any, threads: int, way: str) -> None:
    size, misalignment, offset, zero_copy, staged, buffered, blocks = WAYS[way]
    tensor = Guarded(bytes(size), misalignment).tensor
    with deepnvme.Engine(backend=backend, block_size=65536, num_threads=threads) as engine:
        engine.write(tensor, drive / "file", offset).result()
        written = engine.stats()
        engine.read(tensor, drive / "file", offset if size else 0).result()
        both = engine.stats()
    ways = {"bytes_zero_copy": zero_copy, "bytes_staged": staged, "bytes_buffered": buffered, "blocks": blocks}
    assert moved(written) == {"bytes_read": 0, "bytes_written": size, **ways}
    assert moved(both) == {"bytes_read": size, "bytes_written": size, **{name: 2 * value for name, value in ways.items()}}
    assert both.bytes_direct == 2 * (zero_copy + staged)
    assert (both.requests, both.failed_requests, both.fallbacks) == (2, 0, {})


def test_requests_that_failed_are_counted_among_all(faulty: Any, drive: Path) -> None:
    engine = faulty("threads", error_every=3, error=errno.EIO)
    futures = [engine.write(page_aligned(bytes(4096)), drive / str(index)) for index in range(9)]
    failed = [future for future in futures if future.exception()]
    stats = engine.stats()
    assert (stats["requests"], stats["failed_requests"], len(failed), stats["blocks"]) == (9, 3, 3, 6)
