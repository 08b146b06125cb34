"""Files whose pages belong to one tensor each: nothing of them goes through the page cache, which drops bytes in silence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import deepnvme

from ..support.memory import Guarded, page_aligned, pattern, zeros

PAGE = 4096
SIZES = [1, 511, 512, 4000, 4095, 4096, 4097, 65536 + 1, 300_001]


def there_and_back(engine: Any, path: Path, size: int, misalignment: int) -> None:
    """In the midst of a file: its neighbours stay, and reading touches nothing else."""
    content, pages = pattern(size), -(-size // PAGE) * PAGE
    path.write_bytes(b"x" * (PAGE + pages + PAGE))
    target = zeros(size, misalignment)
    with engine.open(path, "rw", whole_pages=True) as file:
        assert engine.write(Guarded(content, misalignment).tensor, file, PAGE).result() == size
        written = path.read_bytes()
        assert (written[:PAGE], written[PAGE : PAGE + size], written[PAGE + pages :]) == (b"x" * PAGE, content, b"x" * PAGE)
        assert engine.read(target.tensor, file, PAGE).result() == size
    assert target.content() == content
    assert target.guards_are_intact()


@pytest.mark.parametrize("misalignment", [0, 1, 64])
@pytest.mark.parametrize("block_size", [512, 65536])
def test_nothing_goes_through_the_page_cache(drive: Path, backend: Any, block_size: int, misalignment: int) -> None:
    with deepnvme.Engine(backend=backend, block_size=block_size, num_threads=2) as engine:
        for size in SIZES:
            there_and_back(engine, drive / "file", size, misalignment)
        stats = engine.stats()
    assert (stats.bytes_buffered, stats.bytes_written, stats.bytes_read) == (0, sum(SIZES), sum(SIZES))


@pytest.mark.parametrize("size", SIZES)
def test_short_transfers_are_resumed_where_they_stopped(faulty: Any, drive: Path, backend: Any, size: int) -> None:
    for short_bytes in (511, 512, 4000):
        there_and_back(faulty(backend, short_every=2, short_bytes=short_bytes), drive / "file", size, 1)


@pytest.mark.filterwarnings("ignore:transfers of")
@pytest.mark.parametrize("size", SIZES)
def test_where_direct_transfers_are_refused_the_page_cache_serves(faulty: Any, drive: Path, backend: Any, size: int) -> None:
    there_and_back(faulty(backend, refuse_direct=True), drive / "file", size, 0)


def test_a_write_past_the_end_fills_its_last_page_with_zeros(engine: deepnvme.Engine, drive: Path) -> None:
    """And not with what was in the staging memory before."""
    with engine.open(drive / "file", "w+", whole_pages=True) as file:
        engine.write(page_aligned(b"x" * (2 * PAGE - 1)), file).result()
        engine.write(page_aligned(b"y" * (PAGE + 1)), file).result()
    assert (drive / "file").read_bytes() == b"y" * (PAGE + 1) + bytes(PAGE - 1)
