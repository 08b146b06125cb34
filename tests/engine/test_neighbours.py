"""Writes that share pages, files and engines. A page half buffered and half direct loses one half, or fails the next fsync."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import deepnvme

from ..support.memory import page_aligned, pattern, zeros

KIB = 1024


def cuts(total: int, count: int, seed: int) -> list[tuple[int, int]]:
    """[begin, end) of ``count`` neighbours that fill ``total`` bytes, in a random order."""
    chance = random.Random(seed)
    borders = [0, *sorted(chance.sample(range(1, total), count - 1)), total]
    pieces = list(itertools.pairwise(borders))
    chance.shuffle(pieces)
    return pieces


def on_the_drive(path: Path) -> bytes:
    """What a reader finds once the page cache is out of the way."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return file.read()


@pytest.mark.parametrize("opened", [False, True])
@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("block_size", [512, 5000, 1 << 20])
def test_neighbours_written_at_once_are_all_there(drive: Path, backend: Any, block_size: int, threads: int, opened: bool) -> None:
    total = 256 * KIB
    with deepnvme.Engine(backend=backend, block_size=block_size, num_threads=threads) as engine:
        for round_ in range(8):
            content = pattern(total, round_)
            path = drive / str(round_ % 2)
            pieces = [(begin, page_aligned(content[begin:end])) for begin, end in cuts(total, 40, round_)]
            with engine.open(path, "rw") if opened else contextlib.nullcontext(path) as target:
                for future in [engine.write(tensor, target, begin) for begin, tensor in pieces]:
                    future.result()
            assert on_the_drive(path) == content


def test_neighbours_written_by_engines_of_their_own_are_all_there(drive: Path, backends: list[Any]) -> None:
    total = 256 * KIB
    engines = [deepnvme.Engine(backend=name) for name in backends]
    for round_ in range(20):
        content = pattern(total, round_)
        futures = [
            engines[index % len(engines)].write(page_aligned(content[begin:end]), drive / "file", begin)
            for index, (begin, end) in enumerate(cuts(total, 60, round_))
        ]
        for future in futures:
            future.result()
        assert on_the_drive(drive / "file") == content
    for engine in engines:
        engine.close()


def test_neighbours_written_by_threads_on_one_engine_are_all_there(drive: Path, backend: Any) -> None:
    total, count = 512 * KIB, 4
    content = pattern(total)
    pieces = cuts(total, 200, 0)
    failures: list[BaseException] = []

    def write(mine: list[tuple[int, int]]) -> None:
        try:
            for begin, end in mine:
                engine.write(page_aligned(content[begin:end]), drive / "file", begin).result()
        except BaseException as error:
            failures.append(error)

    with deepnvme.Engine(backend=backend, num_threads=2) as engine:
        threads = [threading.Thread(target=write, args=(pieces[number::count],)) for number in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failures
    assert on_the_drive(drive / "file") == content


def test_reading_one_half_while_the_other_is_written_disturbs_neither(drive: Path, backend: Any) -> None:
    half = 128 * KIB + 777
    still = pattern(half, 1)
    (drive / "file").write_bytes(still + bytes(half))
    with deepnvme.Engine(backend=backend, num_threads=2) as engine:
        for round_ in range(20):
            moving = pattern(half, round_)
            pieces = [(begin + half, page_aligned(moving[begin:end])) for begin, end in cuts(half, 10, round_)]
            targets = [(begin, end, zeros(end - begin)) for begin, end in cuts(half, 10, round_ + 100)]
            futures = []
            for (at, source), (begin, _, target) in zip(pieces, targets, strict=True):
                futures.append(engine.write(source, drive / "file", at))
                futures.append(engine.read(target.tensor, drive / "file", begin))
            for future in futures:
                future.result()
            for begin, end, target in targets:
                assert target.content() == still[begin:end]
            assert on_the_drive(drive / "file") == still + moving


@pytest.mark.parametrize(("block_size", "short"), [(512, 100), (1536, 100), (10_000, 1000)])
def test_a_direct_write_cut_short_within_a_page_leaves_the_rest_of_the_page_to_its_neighbours(
    faulty: Callable[..., Any], backend: Any, drive: Path, block_size: int, short: int
) -> None:
    """Resumed through the page cache, it collides with the direct blocks beside it; the kernel then fails the next fsync."""
    engine = faulty(backend, block_size=block_size, num_threads=2, short_every=3, short_bytes=short)
    for round_ in range(15):
        content = pattern(256 * KIB, round_)
        path = drive / str(round_ % 4)
        engine.write(page_aligned(content), path).result()
        assert on_the_drive(path) == content
