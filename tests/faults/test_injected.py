"""Short transfers, interruptions, refusals and errors, injected around every backend."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ..support.faulty_filesystem import FaultyFilesystem
from ..support.memory import Guarded, page_aligned, pattern, zeros
from ..support.patience import PATIENCE, until

Faulty = Callable[..., Any]
CONTENT = pattern(100_001)


def round_trip(engine: Any, path: Path, misalignment: int = 0, offset: int = 0) -> None:
    """Write and read CONTENT, and look at both sides of each."""
    source = Guarded(CONTENT, misalignment)
    assert engine.write(source.tensor, path, offset).result() == len(CONTENT)
    assert path.read_bytes() == bytes(offset) + CONTENT
    target = zeros(len(CONTENT), misalignment)
    assert engine.read(target.tensor, path, offset).result() == len(CONTENT)
    assert target.content() == CONTENT
    assert target.guards_are_intact()


@pytest.mark.parametrize(("short_every", "short_bytes"), [(1, 4096), (1, 5000), (2, 512), (2, 1000), (3, 1)])
@pytest.mark.parametrize(("misalignment", "offset"), [(0, 0), (1, 0), (0, 777)])
def test_a_short_transfer_is_resumed_where_it_stopped(
    faulty: Faulty, backend: Any, drive: Path, short_every: int, short_bytes: int, misalignment: int, offset: int
) -> None:
    engine = faulty(backend, block_size=16384, short_every=short_every, short_bytes=short_bytes)
    round_trip(engine, drive / "file", misalignment, offset)
    stats = engine.stats()
    assert stats["short_transfers"] > 0
    assert stats["bytes_written"] == len(CONTENT)


@pytest.mark.parametrize("error", [errno.EINTR, errno.EAGAIN], ids=errno.errorcode.get)
@pytest.mark.parametrize("error_every", [2, 3])
def test_what_the_system_puts_off_is_tried_again(faulty: Faulty, backend: Any, drive: Path, error: int, error_every: int) -> None:
    engine = faulty(backend, error_every=error_every, error=error)
    round_trip(engine, drive / "file", 1, 777)
    assert engine.stats()["retries"] > 0
    assert engine.stats()["failed_requests"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("error", [errno.EINTR, errno.EAGAIN], ids=errno.errorcode.get)
def test_what_the_system_puts_off_for_ever_is_an_error_in_the_end(faulty: Faulty, backend: Any, drive: Path, error: int) -> None:
    engine = faulty(backend, error_every=1, error=error)
    begin = time.monotonic()
    with pytest.raises(OSError, match="write of 4096 bytes at offset 0") as caught:
        engine.write(page_aligned(CONTENT[:4096]), drive / "file").result(PATIENCE)
    assert caught.value.errno == error
    assert time.monotonic() - begin < PATIENCE / 5  # not to hold up its request for more than a few seconds


def test_others_go_on_while_transfers_wait_to_be_tried_again(faulty: Faulty, backend: Any, drive: Path) -> None:
    """100 at a time, at most 1000 times, with a pause of 1 ms before each."""
    engine = faulty(backend, queue_depth=128, error_every=1, error=errno.EAGAIN, error_from=1 << 20)
    with engine.open(drive / "file", "rw") as file:
        engine.write(page_aligned(bytes(4096)), file).result()
        futures = [engine.write(page_aligned(bytes(4096)), file, (1 << 20) + 4096 * index) for index in range(100)]
        while engine.stats()["retries"] < 2000:
            time.sleep(0.001)
        begin = time.monotonic()
        for _ in range(1000):
            engine.read(page_aligned(bytes(4096)), file).result()
        assert time.monotonic() - begin < PATIENCE / 5  # a worker that slept meanwhile took 0.1 s for each
        assert {future.exception(PATIENCE).errno for future in futures} == {errno.EAGAIN}


@pytest.mark.parametrize("refuse_every", [2, 3])
def test_a_full_backend_is_offered_the_rest_later(faulty: Faulty, backend: Any, drive: Path, refuse_every: int) -> None:
    engine = faulty(backend, queue_depth=4, refuse_every=refuse_every)
    round_trip(engine, drive / "file", 1, 777)


@pytest.mark.slow
@pytest.mark.parametrize("queue_depth", [1, 32])
def test_a_backend_that_is_full_for_ever_is_an_error_in_the_end(interpreters: Any, drive: Path, queue_depth: int) -> None:
    """In an interpreter of its own, which can be killed if it hangs."""
    interpreters.run(f"""
        faults = testing.Faults()
        faults.refuse_every = 1
        engine = testing.faulty_engine("threads", 4096, {queue_depth}, 1, False, faults)
        for _ in range(2):  # the worker must be there for the next one too
            try:
                engine.write(torch.ones(512), {str(drive / "file")!r}).result()
            except OSError:
                pass
    """).check()


@pytest.mark.parametrize("direction", ["read", "write"])
def test_an_error_is_of_its_request_alone(faulty: Faulty, backend: Any, drive: Path, direction: str) -> None:
    (drive / "file").write_bytes(bytes(20 * 4096))
    engine = faulty(backend, error_every=7, error=errno.EIO)
    futures = [getattr(engine, direction)(page_aligned(bytes(4096)), drive / "file", at * 4096) for at in range(20)]
    failed = [at for at, future in enumerate(futures) if future.exception() is not None]
    assert failed == [6, 13]


@pytest.mark.parametrize("direction", ["read", "write"])
@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC, errno.EBADF, errno.ESTALE, errno.EPERM], ids=errno.errorcode.get)
def test_an_error_says_what_was_tried_where(faulty: Faulty, backend: Any, drive: Path, direction: str, error: int) -> None:
    (drive / "file").write_bytes(bytes(20_000))
    engine = faulty(backend, error_every=1, error=error)
    kind = PermissionError if error == errno.EPERM else OSError
    with pytest.raises(kind, match=f"{direction} of 5000 bytes at offset 8192") as caught:
        getattr(engine, direction)(page_aligned(bytes(5000)), drive / "file", 8192).result()
    assert (caught.value.errno, caught.value.filename) == (error, str(drive / "file"))


def test_a_large_request_with_one_bad_block_fails_and_what_follows_does_not(faulty: Faulty, backend: Any, drive: Path) -> None:
    engine = faulty(backend, queue_depth=4, error_every=30, error_limit=1, error=errno.EIO)
    bad = engine.write(page_aligned(bytes(100 * 4096)), drive / "bad")
    with pytest.raises(OSError, match="write of 409600 bytes"):
        bad.result()
    round_trip(engine, drive / "file", 1, 777)


def test_what_one_worker_fails_the_others_give_up(faulty: Faulty, backend: Any, drive: Path) -> None:
    engine = faulty(backend, queue_depth=2, num_threads=3, error_every=50, error=errno.EIO)
    contents = [pattern(200_000 + index, index) for index in range(30)]
    futures = [engine.write(page_aligned(each), drive / str(index)) for index, each in enumerate(contents)]
    good = [index for index, future in enumerate(futures) if future.exception(PATIENCE) is None]
    assert 0 < len(good) < 30
    assert all((drive / str(index)).read_bytes() == contents[index] for index in good)


@pytest.mark.filterwarnings("ignore:transfers of")
def test_a_file_that_refuses_direct_transfers_goes_through_the_page_cache(faulty: Faulty, backend: Any, drive: Path) -> None:
    engine = faulty(backend, refuse_direct=True)
    round_trip(engine, drive / "file", 1, 777)
    stats = engine.stats()
    assert stats["bytes_buffered"] == 2 * len(CONTENT)
    assert stats["bytes_direct"] == 0
    assert set(stats["fallbacks"]) == {f"a direct {what} was refused: Invalid argument" for what in ("write", "read")}


@pytest.mark.slow
def test_a_file_that_refuses_direct_transfers_is_warned_of(interpreters: Any, drive: Path) -> None:
    """When the request's end is asked for, at the latest: there may be no other request to bring the news."""
    interpreters.run(f"""
        faults = testing.Faults()
        faults.refuse_direct = True
        engine = testing.faulty_engine("threads", 4096, 32, 1, False, faults)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            engine.write(torch.ones(4096), {str(drive / "file")!r}).result()
        assert [type(warning.message) for warning in caught] == [RuntimeWarning], caught
        assert {str(drive / "file")!r} in str(caught[0].message), caught[0].message
    """).check()


@pytest.mark.parametrize("break_after", [1, 5, 50])
def test_a_broken_backend_fails_every_request_and_holds_up_none(
    faulty: Faulty, backend: Any, drive: Path, break_after: int
) -> None:
    tensors = [page_aligned(bytes(20_000)) for _ in range(30)]
    engine = faulty(backend, queue_depth=8, break_after=break_after)
    futures = [engine.write(tensor, drive / str(index)) for index, tensor in enumerate(tensors)]
    errors = [future.exception(PATIENCE) for future in futures]
    assert errors[-1] is not None
    assert errors[-1].errno == errno.EBADF
    assert "a broken backend" in str(errors[-1])
    assert engine.write(tensors[0], drive / "later").exception(PATIENCE) is not None
    with pytest.raises(OSError, match="a broken backend"):
        engine.fsync(drive / "0").result(PATIENCE)
    engine.close()
    assert engine.stats()["requests"] == 32


@pytest.mark.parametrize("faults", [
    {"short_every": 2, "short_bytes": 1000, "error_every": 3, "error": errno.EINTR},
    {"short_every": 3, "short_bytes": 512, "error_every": 5, "error": errno.EAGAIN, "refuse_every": 2},
    {"error_every": 2, "error": errno.EAGAIN, "refuse_every": 3},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("threads", [1, 3])
def test_faults_together_lose_nothing(faulty: Faulty, backend: Any, drive: Path, faults: dict[str, int], threads: int) -> None:
    engine = faulty(backend, block_size=8192, queue_depth=4, num_threads=threads, **faults)
    contents = [pattern(30_000 + index, index) for index in range(20)]
    futures = [engine.write(Guarded(each, index % 3).tensor, drive / str(index)) for index, each in enumerate(contents)]
    assert [future.result(PATIENCE) for future in futures] == [len(each) for each in contents]
    assert [(drive / str(index)).read_bytes() for index in range(20)] == contents


def test_a_broken_backend_s_requests_end_when_nothing_uses_their_memory_any_more(
    faulty: Faulty, backend: Any, direct_disk: FaultyFilesystem
) -> None:
    (direct_disk.behind / "file").write_bytes(CONTENT)
    engine = faulty(backend, break_after=2)
    target, another = page_aligned(bytes(4096)), page_aligned(bytes(4096))
    direct_disk.fail("read", effect="hang", times=-1)
    future = engine.read(target, direct_disk / "file")
    until(lambda: direct_disk.counts().get("read"))
    engine.read(another, direct_disk / "file")
    with pytest.raises(TimeoutError):
        future.result(0.5)
    direct_disk.heal()
    with pytest.raises(OSError, match="a broken backend"):
        future.result(PATIENCE)
    assert bytes(target.numpy()) == CONTENT[:4096]
