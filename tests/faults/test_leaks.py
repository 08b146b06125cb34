"""What an engine takes from the system it gives back: descriptors, threads, mappings, locked pages, memory."""

from __future__ import annotations

import errno
import gc
import os
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import deepnvme

from ..support.memory import Guarded, page_aligned, zeros

KIB = 1024


def holdings() -> dict[str, int]:
    """What this process holds, by kind."""
    gc.collect()
    status = Path("/proc/self/status").read_text()
    comms = [(task / "comm").read_text() for task in Path("/proc/self/task").iterdir() if (task / "comm").exists()]
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": sum(not comm.startswith("iou-") for comm in comms),  # those the kernel makes for io_uring come and go
        "mappings": len(Path("/proc/self/maps").read_text().splitlines()),
        "locked KiB": int(re.search(r"VmLck:\s+(\d+)", status)[1]),  # type: ignore[index]
    }


def assert_nothing_is_kept(times: int, work: Callable[[], object]) -> None:
    for _ in range(3):
        work()  # what is kept once is kept for good
    before = holdings()
    for _ in range(times):
        work()
    after = holdings()
    # The allocator may keep a mapping or two for itself; a leak of the engine's would be one for each time.
    assert after["mappings"] - before["mappings"] < 20
    assert {**after, "mappings": 0} == {**before, "mappings": 0}


def refused(engine: deepnvme.Engine, drive: Path) -> None:
    (drive / "file").write_bytes(bytes(100))
    for attempt in (
        lambda: engine.read(zeros(200).tensor, drive / "file"),
        lambda: engine.read(zeros(200).tensor, drive / "missing"),
        lambda: engine.write(zeros(200).tensor, drive),
        lambda: engine.write(zeros(200).tensor, drive / "file", 2**63 - 1000),
        lambda: engine.open(drive / "file", "x"),
    ):
        with pytest.raises((OSError, ValueError)):
            attempt()


def opened(engine: deepnvme.Engine, drive: Path) -> None:
    file = engine.open(drive / "file", "rw")
    engine.write(page_aligned(bytes(9 * KIB)), file, 7).result()  # both descriptors


def thousand(engine: deepnvme.Engine, drive: Path) -> None:
    tensor = page_aligned(bytes(5 * KIB))
    for future in [engine.write(tensor, drive / str(index % 100), 7) for index in range(1000)]:
        future.result()


WORKS: dict[str, tuple[int, Callable[[deepnvme.Engine, Path], object]]] = {
    "refused requests": (50, refused),
    "open files": (100, opened),
    "a thousand requests": (1, thousand),
    "pinned tensors": (100, lambda engine, drive: engine.empty_pinned(1 << 20)),
}


@pytest.mark.parametrize("name", WORKS)
def test_what_an_engine_does_leaves_nothing_behind(engine: deepnvme.Engine, drive: Path, name: str) -> None:
    times, work = WORKS[name]
    assert_nothing_is_kept(times, lambda: work(engine, drive))


@pytest.mark.slow
@pytest.mark.parametrize("dropped", [False, True])
def test_a_hundred_engines_leave_nothing_behind(drive: Path, backend: Any, dropped: bool) -> None:
    tensor = Guarded(bytes(100 * KIB), 1).tensor  # staged, so that the staging is there to be leaked

    def work() -> None:
        engine = deepnvme.Engine(backend=backend, queue_depth=4)
        future = engine.write(tensor, drive / "file", 7)
        if not dropped:
            future.result()
            engine.close()

    assert_nothing_is_kept(50, work)


def test_handles_that_are_dropped_leave_nothing_behind(op: ModuleType, drive: Path) -> None:
    tensor = page_aligned(bytes(100 * KIB))
    assert_nothing_is_kept(50, lambda: op.aio_handle().async_pwrite(tensor, str(drive / "file")))


def test_failed_requests_leave_nothing_behind(faulty: Any, drive: Path) -> None:
    engine = faulty("threads", error_every=2, error=errno.EIO)
    tensor = page_aligned(bytes(50 * KIB))
    assert_nothing_is_kept(100, lambda: engine.write(tensor, drive / "file", 7).exception())


def test_memory_does_not_grow_with_the_requests_that_have_been(drive: Path) -> None:
    def resident() -> int:
        return int(re.search(r"VmRSS:\s+(\d+)", Path("/proc/self/status").read_text())[1])  # type: ignore[index]

    tensor = page_aligned(bytes(KIB))
    with deepnvme.Engine() as engine, engine.open(drive / "file", "w") as file:
        for _ in range(2000):
            engine.write(tensor, file).result()
        before = resident()
        for _ in range(10_000):
            engine.write(tensor, file).result()
        assert resident() - before < 2000  # KiB: 0.2 a request would be a leak of each


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2])
def test_staging_takes_no_more_than_its_share(interpreters: Any, drive: Path, threads: int) -> None:
    """A misaligned tensor of 256 MiB, depth 128 and 1 MiB blocks: 64 MiB of staging in all, as is promised."""
    (drive / "file").touch()
    os.truncate(drive / "file", 256 << 20)
    interpreters.run(f"""
        import deepnvme, re
        def memory(name):
            return int(re.search(name + r":\\s+(\\d+)", open("/proc/self/status").read())[1])
        engine = deepnvme.Engine(queue_depth=128, num_threads={threads})
        tensor = torch.zeros((256 << 20) + 1, dtype=torch.uint8)[1:]
        before = memory("VmRSS")
        open("/proc/self/clear_refs", "w").write("5")  # the high-water mark starts anew
        engine.read(tensor, {str(drive / "file")!r}).result()
        grown = memory("VmHWM") - before
        assert engine.stats().bytes_staged == 256 << 20
        assert grown < (64 + 8) << 10, grown
    """).check()


def test_tensors_of_a_handle_are_let_go_after_wait(op: ModuleType, drive: Path) -> None:
    import weakref

    handle = op.aio_handle()
    tensor = torch.zeros(1000)
    alive = weakref.ref(tensor.untyped_storage())
    handle.async_pwrite(tensor, str(drive / "file"))
    del tensor
    handle.wait()
    assert alive() is None
