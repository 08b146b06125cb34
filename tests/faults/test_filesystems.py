"""File systems with other sectors, other block sizes, or no direct I/O."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import deepnvme

from ..support.disks import MIB, Disk, loop_disk, memory_disk
from ..support.memory import Guarded, page_aligned, pattern, zeros

pytestmark = [pytest.mark.root, pytest.mark.slow]

# file system, sector size, options of mkfs
KINDS = {
    "ext4 on 4096-byte sectors": ("ext4", 4096, ()),
    "ext4 with 1024-byte blocks": ("ext4", 512, ("-b", "1024")),
    "xfs on 4096-byte sectors": ("xfs", 4096, ()),
    "xfs with 1024-byte blocks": ("xfs", 512, ("-b", "size=1024")),
    "xfs with 16 KiB blocks": ("xfs", 512, ("-b", "size=16384")),
    "xfs on 16 KiB sectors": ("xfs", 16384, ("-b", "size=16384", "-s", "size=16384")),
}


@pytest.fixture(params=KINDS)
def disk(request: pytest.FixtureRequest, drive: Path) -> Iterator[Disk]:
    filesystem, sector_size, options = KINDS[request.param]
    with loop_disk(drive, filesystem, 320 * MIB, sector_size, options) as disk:
        yield disk


def test_any_transfer_comes_back(disk: Disk, backends: list[Any], interpreters: Any) -> None:
    run_apart(interpreters, f"transfer_anything({str(disk.path)!r}, {backends})")


def transfer_anything(directory: str, backends: list[Any]) -> None:
    path = Path(directory, "file")
    chance = random.Random(0)
    for backend in backends:
        for block_size in (512, 5000, 1 << 20):
            with deepnvme.Engine(backend=backend, block_size=block_size, num_threads=2) as engine:
                for _ in range(8):
                    offset = chance.choice([0, 512, 4096, chance.randrange(100_000)])
                    content = pattern(chance.choice([1, 4096, 65536, chance.randrange(300_000)]), chance.randrange(1000))
                    misalignment = chance.choice([0, 4, 512, chance.randrange(4096)])
                    path.unlink(missing_ok=True)
                    engine.write(Guarded(content, misalignment).tensor, path, offset).result()
                    assert path.read_bytes() == bytes(offset) + content
                    target = zeros(len(content), misalignment)
                    engine.read(target.tensor, path, offset).result()
                    assert target.content() == content
                    assert target.guards_are_intact()


def test_neighbours_share_the_file_systems_blocks(disk: Disk, backends: list[Any], interpreters: Any) -> None:
    run_apart(interpreters, f"write_neighbours({str(disk.path)!r}, {backends})")


def write_neighbours(directory: str, backends: list[Any]) -> None:
    total = 512 * 1024
    for backend in backends:
        with deepnvme.Engine(backend=backend, num_threads=2) as engine:
            for round_ in range(6):
                content = pattern(total, round_)
                path = Path(directory, str(round_ % 4))
                borders = [0, *sorted(random.Random(round_).sample(range(1, total), 40)), total]
                with engine.open(path, "rw") as file:
                    pieces = [(begin, page_aligned(content[begin:end])) for begin, end in itertools.pairwise(borders)]
                    for future in [engine.write(tensor, file, begin) for begin, tensor in pieces]:
                        future.result()
                with path.open("rb") as opened:
                    os.fsync(opened.fileno())  # EIO here is the kernel saying that cached and direct writes have collided
                    os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                    assert opened.read() == content, f"{backend}, round {round_}"


def run_apart(interpreters: Any, call: str) -> None:
    """In a process that can be killed: one that hangs would keep the file system from being unmounted."""
    interpreters.run(f"from tests.faults.test_filesystems import *\n{call}").check()


def test_large_transfers_go_direct(disk: Disk, engine: deepnvme.Engine) -> None:
    engine.write(engine.empty_pinned(MIB), disk / "file").result()
    assert engine.stats().fallbacks == {}
    assert engine.stats().bytes_zero_copy == 4 * MIB


@pytest.mark.filterwarnings("ignore:transfers of")
@pytest.mark.parametrize("misalignment", [0, 1])
def test_without_direct_io_every_byte_goes_through_the_page_cache(tmpfs: Disk, backend: Any, misalignment: int) -> None:
    content = pattern(300_001)
    target = zeros(len(content), misalignment)
    with deepnvme.Engine(backend=backend, num_threads=2) as engine:
        engine.write(Guarded(content, misalignment).tensor, tmpfs / "file", 777).result()
        engine.read(target.tensor, tmpfs / "file", 777).result()
        stats = engine.stats()
    assert (tmpfs / "file").read_bytes() == bytes(777) + content
    assert target.content() == content
    assert (stats.bytes_buffered, stats.bytes_direct) == (2 * len(content), 0)
    assert stats.fallbacks == {"tmpfs has no direct I/O": 2}


@pytest.mark.filterwarnings("ignore:transfers of")
def test_a_file_system_that_does_not_know_its_size_is_not_taken_for_full(drive: Path, engine: deepnvme.Engine) -> None:
    """It says that it has no blocks, and none free: a tmpfs without a limit, and many a file system in user space."""
    with memory_disk(drive, 0) as unlimited:
        assert engine.write(page_aligned(bytes(10_000)), unlimited / "file").result() == 10_000


def test_going_without_direct_io_is_warned_of_once(tmpfs: Disk, interpreters: Any) -> None:
    interpreters.run(f"""
        import deepnvme
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for engine in (deepnvme.Engine(), deepnvme.Engine("threads")):
                for name in ("first", "second"):
                    engine.write(torch.ones(10000), {str(tmpfs.path)!r} + "/" + name).result()
        assert [type(warning.message) for warning in caught] == [RuntimeWarning], caught
        expected = "transfers of {tmpfs.path}/first' go through the page cache, without direct I/O: tmpfs has no direct I/O"
        assert str(caught[0].message) == expected.replace("of /", "of '/"), caught[0].message
    """).check()


def test_a_warning_made_an_error_leaves_the_engine_whole(tmpfs: Disk, interpreters: Any) -> None:
    interpreters.run(f"""
        import deepnvme
        engine = deepnvme.Engine()
        try:
            engine.write(torch.ones(10000), {str(tmpfs / "first")!r}).result()
        except RuntimeWarning:
            pass
        else:
            raise AssertionError("no warning")
        assert engine.write(torch.ones(10000), {str(tmpfs / "second")!r}).result() == 40000
        engine.close()
    """).check()
    assert (tmpfs / "first").stat().st_size == (tmpfs / "second").stat().st_size == 40_000
