"""Thousands of requests pending, few descriptors to be had."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import deepnvme

from ..support.disks import MIB, loop_disk
from ..support.memory import page_aligned

pytestmark = pytest.mark.slow


@pytest.fixture
def throwaway(drive: Path) -> Iterator[Path]:
    """For thousands of files: a file system of its own where one can be had, since that is quicker to be rid of."""
    with contextlib.ExitStack() as stack:
        place = drive
        with contextlib.suppress(pytest.skip.Exception):
            place = stack.enter_context(loop_disk(drive, "ext4", 512 * MIB)).path
        yield place


@pytest.mark.parametrize(("maker", "count"), [("deepnvme.Engine()", 20_000), ("op.aio_handle()", 2_000)])
def test_thousands_of_files_are_written_with_few_descriptors(interpreters: Any, throwaway: Path, maker: str, count: int) -> None:
    interpreters.run(f"""
        import deepnvme, resource
        resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
        made = {maker}
        write = getattr(made, "write" if "Engine" in {maker!r} else "async_pwrite")
        tensors = [torch.full((1024 + 1,), index, dtype=torch.int32) for index in range(100)]  # direct and buffered
        most = 0
        for index in range({count}):
            write(tensors[index % 100], {str(throwaway)!r} + "/" + str(index))
            if index % 100 == 0:
                most = max(most, len(os.listdir("/proc/self/fd")))
                open(os.devnull).close()  # somebody else's, which must not fail
        if hasattr(made, "wait"):
            assert made.wait() == {count}
        else:
            made.close()
            assert (made.stats().requests, made.stats().failed_requests) == ({count}, 0)
        assert most < 128, most
    """).check()  # fmt: skip
    assert all((throwaway / str(index)).stat().st_size == 4100 for index in range(count))
    for index in (0, 1, count // 2, count - 1):
        assert (throwaway / str(index)).read_bytes() == (index % 100).to_bytes(4, "little") * 1025


def test_one_call_for_thousands_of_files_needs_few_descriptors(interpreters: Any, throwaway: Path) -> None:
    interpreters.run(f"""
        import deepnvme, resource
        resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
        tensors = [torch.full((1024 + 1,), index % 100, dtype=torch.int32) for index in range(6000)]
        paths = [{str(throwaway)!r} + "/" + str(index % 3000) for index in range(6000)]
        offsets = [index // 3000 * 4100 for index in range(6000)]
        with deepnvme.Engine() as engine:
            assert engine.write_many(tensors, paths, offsets).result() == 6000 * 4100
            back = [torch.empty_like(tensor) for tensor in tensors]
            assert engine.read_many(back, paths, offsets).result() == 6000 * 4100
        assert all(torch.equal(a, b) for a, b in zip(tensors, back))
    """).check()  # fmt: skip


@pytest.mark.parametrize(("limit", "free"), [(40, None), (256, 6)])
def test_one_call_never_waits_for_what_it_keeps_back(interpreters: Any, drive: Path, limit: int, free: int | None) -> None:
    """Its requests go to the drive some at a time: with fewer permits than that, and with fewer descriptors."""
    interpreters.run(f"""
        import deepnvme, resource
        from tests.support.memory import page_aligned
        tensors = [page_aligned(bytes([index]) * 4096) for index in range(200)]
        paths = [{str(drive)!r} + "/" + str(index) for index in range(200)]
        with deepnvme.Engine() as engine:
            engine.write(tensors[0], paths[0]).result()
            resource.setrlimit(resource.RLIMIT_NOFILE, ({limit}, {limit}))
            taken = []
            if {free}:
                try:
                    while True:
                        taken.append(os.open(os.devnull, os.O_RDONLY))
                except OSError:
                    pass
                for descriptor in taken[-({free} or 0):]:
                    os.close(descriptor)
            assert engine.write_many(tensors, paths).result() == 200 * 4096
            back = [page_aligned(bytes(4096)) for _ in tensors]
            assert engine.read_many(back, paths).result() == 200 * 4096
        assert all(torch.equal(a, b) for a, b in zip(tensors, back))
    """).check()  # fmt: skip


def test_one_descriptor_short_is_an_error_and_not_a_hang(interpreters: Any, drive: Path) -> None:
    """Others hold every descriptor there is; two threads ask at once, and neither may wait for the other."""
    ended = interpreters.run(f"""
        import deepnvme, errno, resource, threading
        engine = deepnvme.Engine("threads")
        engine.write(torch.ones(10), {str(drive / "file")!r}).result()
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        taken = []
        try:
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        except OSError:
            pass
        errors = []
        def ask():
            for _ in range(1000):
                try:
                    engine.write(torch.ones(10), {str(drive / "file")!r})
                except OSError as error:
                    errors.append(error.errno)
        threads = [threading.Thread(target=ask, daemon=True) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        hung = sum(thread.is_alive() for thread in threads)
        sys.stderr.write(str(hung) + " threads hang")
        sys.stderr.flush()
        os._exit(1 if hung or set(errors) != {{errno.EMFILE}} else 0)
    """)  # fmt: skip
    ended.check()


def test_a_hundred_thousand_pending_requests_are_all_done(testing: Any, gate: Any, drive: Path) -> None:
    engine = testing.instant_engine(gate, 4096, 32, 2)
    with (drive / "file").open("wb") as file:
        file.truncate(4096)
    tensor = page_aligned(bytes(4096))
    with engine.open(drive / "file", "rw") as opened:
        futures = [engine.write(tensor, opened) for _ in range(100_000)]
        gate.release()
        engine.close()
    assert all(future.done() for future in futures)
    assert engine.stats()["blocks"] == 100_000


@pytest.mark.parametrize(("queue_depth", "count"), [(1, 20), (2, 20), (4096, 600)])
def test_any_depth_gets_through_more_than_fits(drive: Path, backend: Any, queue_depth: int, count: int) -> None:
    tensor = page_aligned(bytes(range(256)) * 16)
    with deepnvme.Engine(backend=backend, block_size=512, queue_depth=queue_depth) as engine:
        for index in range(count):
            engine.write(tensor, drive / "file", index * 4096)
    assert (drive / "file").read_bytes() == bytes(range(256)) * 16 * count
