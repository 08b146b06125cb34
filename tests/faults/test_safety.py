"""The engine at its edges: backends that break, memory that runs out, drives that hang, transfers that are given up."""

from __future__ import annotations

import errno
import gc
import os
import signal
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import deepnvme

from ..support.faulty_filesystem import FaultyFilesystem
from ..support.memory import page_aligned, pattern
from ..support.patience import PATIENCE, until

Faulty = Callable[..., Any]
BLOCK = 4096


# A backend that breaks.


@pytest.mark.parametrize("stop_fails", [False, True])
def test_memory_that_may_still_be_used_is_kept_for_good(faulty: Faulty, drive: Path, stop_fails: bool) -> None:
    engine = faulty("threads", stop_fails=stop_fails, break_after=1)
    tensor = page_aligned(b"x" * BLOCK)
    alive = weakref.ref(tensor.untyped_storage())
    future = engine.write(tensor, drive / "file")
    assert future.exception().errno == errno.EBADF
    del tensor, future
    engine.close()
    del engine
    gc.collect()
    assert (alive() is not None) == stop_fails


@pytest.mark.parametrize("stop_fails", [False, True])
def test_a_backend_that_breaks_as_it_is_given_a_block_may_have_begun_it(
    faulty: Faulty, testing: Any, gate: Any, drive: Path, stop_fails: bool
) -> None:
    journal = testing.Journal()
    engine = faulty("threads", stop_fails=stop_fails, break_submit_after=1, gate=gate, journal=journal)
    futures, alive = [], []
    for index in range(2):
        tensor = page_aligned(b"x" * BLOCK)
        alive.append(weakref.ref(tensor.untyped_storage()))
        futures.append(engine.write(tensor, drive / "file", index * BLOCK))
        del tensor
        until(lambda: len(journal.entries()) > 0)
    assert [future.exception().errno for future in futures] == [errno.EBADF] * 2
    gc.collect()
    assert [reference() is not None for reference in alive] == [stop_fails] * 2


def test_what_was_not_begun_when_a_backend_broke_is_let_go(faulty: Faulty, drive: Path) -> None:
    engine = faulty("threads", break_after=1, queue_depth=1, stop_fails=True)
    futures = [engine.write(page_aligned(b"x" * BLOCK), drive / "file") for _ in range(2)]
    tensor = page_aligned(b"x" * BLOCK)
    alive = weakref.ref(tensor.untyped_storage())
    futures.append(engine.write(tensor, drive / "file"))
    del tensor
    assert [future.exception().errno for future in futures] == [errno.EBADF] * 3
    assert alive() is None


@pytest.mark.parametrize("break_after", [1, 5, 16])
def test_other_workers_go_on_with_what_a_broken_backend_had_not_begun(
    faulty: Faulty, testing: Any, gate: Any, drive: Path, break_after: int
) -> None:
    """A worker takes 16 blocks at a time; the other one's backend breaks after some of them."""
    journal = testing.Journal()
    engine = faulty("threads", queue_depth=16, num_threads=2, break_first=1, break_submit_after=break_after, single_submit=True,
                    gate=gate, journal=journal)  # fmt: skip
    tensors = [page_aligned(pattern(BLOCK, index)) for index in range(64)]
    future = engine.write_many(tensors, drive / "file", [index * BLOCK for index in range(64)])
    until(lambda: len(journal.entries()) >= 16 + break_after)  # as much as the other can hold, and what the broken one has begun
    gate.release()
    error = future.exception(PATIENCE)
    assert error.errno == errno.EBADF
    assert len(error.indices) <= break_after + 1  # one more may have been begun
    content = (drive / "file").read_bytes()
    whole = set(range(64)) - set(error.indices)
    assert all(content[index * BLOCK : (index + 1) * BLOCK] == pattern(BLOCK, index) for index in whole)
    assert engine.write(tensors[0], drive / "file").result(PATIENCE) == BLOCK


# Memory that runs out.


@pytest.mark.parametrize("every", [1, 3, 5])  # not 2: submit and reap take turns, so that every submit would fail
def test_a_backend_without_memory_is_asked_again(faulty: Faulty, backend: Any, drive: Path, every: int) -> None:
    if every == 1:
        engine = faulty(backend, out_of_memory_every=1)
        error = engine.write(page_aligned(b"x" * BLOCK), drive / "file").exception(PATIENCE)
        assert (error.errno, error.filename) == (errno.ENOMEM, str(drive / "file"))
        return
    engine = faulty(backend, out_of_memory_every=every)
    content = pattern(10 * BLOCK)
    assert engine.write(page_aligned(content), drive / "file").result() == len(content)
    assert (drive / "file").read_bytes() == content


# Transfers that are given up.


def test_a_transfer_that_waits_for_its_turn_is_cancelled_at_once(faulty: Faulty, gate: Any, drive: Path) -> None:
    engine = faulty("threads", queue_depth=1, gate=gate)
    first = engine.write(page_aligned(b"1" * BLOCK), drive / "first")
    second = engine.write(page_aligned(b"2" * BLOCK), drive / "second")
    assert second.cancel()
    error = second.exception()
    assert (error.errno, error.filename) == (errno.ECANCELED, str(drive / "second"))
    assert not first.done()
    gate.release()
    assert first.result() == BLOCK
    assert bytes((drive / "second").read_bytes()) == bytes(BLOCK)  # the space was reserved


def test_blocks_that_were_not_begun_never_are(faulty: Faulty, testing: Any, gate: Any, drive: Path) -> None:
    journal = testing.Journal()
    engine = faulty("threads", queue_depth=2, gate=gate, journal=journal)
    future = engine.write(page_aligned(pattern(100 * BLOCK)), drive / "file")
    until(lambda: len(journal.entries()) >= 2)
    assert future.cancel()
    gate.release()
    assert future.exception().errno == errno.ECANCELED
    assert sum(what == "submit" for what, *_ in journal.entries()) < 100


@pytest.mark.parametrize("refused", [0, 3])
def test_a_transfer_under_way_is_cancelled_where_the_backend_can(faulty: Faulty, gate: Any, drive: Path, refused: int) -> None:
    """It holds back what was submitted, and gives it up if it is asked to: again, if there was no room for that."""
    engine = faulty("threads", gate=gate, refuse_cancels=refused)
    future = engine.write(page_aligned(b"x" * BLOCK), drive / "file")
    assert future.cancel()
    assert future.exception(PATIENCE).errno == errno.ECANCELED


def test_a_transfer_that_waits_to_be_tried_again_is_cancelled(faulty: Faulty, drive: Path) -> None:
    engine = faulty("threads", error_every=1, error=errno.EAGAIN)
    future = engine.write(page_aligned(b"x" * BLOCK), drive / "file")
    until(lambda: engine.stats()["retries"] > 20)  # some pauses
    assert future.cancel()
    assert future.exception(PATIENCE).errno == errno.ECANCELED


def test_a_transfer_that_has_ended_is_not_cancelled(engine: deepnvme.Engine, drive: Path) -> None:
    future = engine.write(page_aligned(b"x" * BLOCK), drive / "file")
    future.result()
    assert not future.cancel()
    assert future.result() == BLOCK


def test_a_flush_that_waits_for_writes_is_cancelled_at_once(faulty: Faulty, testing: Any, gate: Any, drive: Path) -> None:
    engine = faulty("threads", queue_depth=1, gate=gate)
    futures = [engine.write(page_aligned(b"x" * BLOCK), drive / "file") for _ in range(2)]
    flush = engine.fsync(drive / "file")
    assert flush.cancel()
    assert flush.exception().errno == errno.ECANCELED
    gate.release()
    assert [future.result() for future in futures] == [BLOCK] * 2


def test_all_transfers_of_an_engine_are_cancelled(faulty: Faulty, gate: Any, backend: Any, drive: Path) -> None:
    engine = faulty(backend, queue_depth=2, gate=gate)
    futures = [engine.write(page_aligned(b"x" * BLOCK), drive / str(index)) for index in range(20)]
    assert engine.cancel() == 20
    gate.release()
    for future in futures:
        error = future.exception()
        assert error is None or error.errno == errno.ECANCELED
    assert sum(future.exception() is not None for future in futures) >= 18
    assert engine.cancel() == 0


def test_a_tensor_lives_until_its_cancelled_transfer_has_ended(faulty_disk: FaultyFilesystem) -> None:
    with deepnvme.Engine("threads") as engine:
        faulty_disk.fail("write", effect="hang", times=-1)
        tensor = page_aligned(b"x" * BLOCK)
        alive = weakref.ref(tensor.untyped_storage())
        future = engine.write(tensor, faulty_disk / "file")
        del tensor
        until(lambda: faulty_disk.counts()["write"] > 0)  # it hangs in a system call
        assert future.cancel()
        gc.collect()
        assert alive() is not None
        faulty_disk.heal()
        assert future.exception(PATIENCE) is not None


def test_requests_are_cancelled_by_several_threads_while_they_end(engine: deepnvme.Engine, drive: Path) -> None:
    """Each ends once, whole or with ECANCELED."""
    futures = [engine.write(page_aligned(b"x" * BLOCK * 8), drive / str(index % 4), index * 8 * BLOCK) for index in range(500)]

    def cancel() -> None:
        for future in reversed(futures):
            future.cancel()

    threads = [threading.Thread(target=cancel) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for future in futures:
        error = future.exception()
        assert error is None or error.errno == errno.ECANCELED
    assert engine.stats().requests == 500


# Drives that hang.


def test_closing_with_a_timeout_says_what_is_under_way(faulty: Faulty, gate: Any, drive: Path) -> None:
    engine = faulty("threads", gate=gate)
    engine.write(page_aligned(b"x" * BLOCK), drive / "file")
    future = engine.write(page_aligned(b"x" * BLOCK), drive / "file", BLOCK)
    oldest = f"write of {BLOCK} bytes at offset 0 '{drive / 'file'}'"
    with pytest.raises(TimeoutError, match=f"2 transfers, the oldest: {oldest} not ended within 0.05 s"):
        engine.close(0.05)
    assert not engine.closed
    gate.release()
    engine.close(30)
    assert engine.closed
    assert future.result() == BLOCK


@pytest.mark.slow
def test_an_interpreter_that_waits_at_exit_says_so_and_leaves_on_ctrl_c(interpreters: Any, drive: Path) -> None:
    child = interpreters.start(f"""
        import atexit
        atexit.register(print, "called later")
        gate = testing.Gate()
        gate.hold()
        engine = testing.faulty_engine("threads", {BLOCK}, 8, 1, False, testing.Faults(), gate)
        future = engine.write(torch.zeros({BLOCK}, dtype=torch.uint8), {str(drive / "file")!r})
        print("kept in a buffer")
    """)
    says = interpreters.stdout().with_name("stderr")
    until(lambda: "Ctrl-C ends the process" in says.read_text())
    assert f"deepnvme: waiting at exit for 1 transfer: write of {BLOCK} bytes at offset 0" in says.read_text()
    os.kill(child, signal.SIGINT)
    ended = interpreters.wait(child)
    assert ended.returncode == -signal.SIGINT  # as of any program that Ctrl-C ends
    assert ended.stdout.split("\n") == ["kept in a buffer", "called later", ""]


def test_an_interpreter_whose_transfers_end_soon_says_nothing(interpreters: Any, drive: Path) -> None:
    ended = interpreters.run(f"""
        import deepnvme
        engine = deepnvme.Engine()
        engine.write(torch.zeros({BLOCK}, dtype=torch.uint8), {str(drive / "file")!r})
    """)
    ended.check()
    assert ended.stderr == ""


def test_a_transfer_begun_while_another_thread_closes_raises_or_ends(drive: Path) -> None:
    for _ in range(20):
        engine = deepnvme.Engine("threads")
        tensor = torch.zeros(BLOCK, dtype=torch.uint8)
        closing = threading.Thread(target=engine.close)
        futures: list[deepnvme.Future] = []

        def write_on(engine: deepnvme.Engine = engine, tensor: torch.Tensor = tensor, futures: list[Any] = futures) -> None:
            while True:
                futures.append(engine.write(tensor, drive / "file"))

        closing.start()
        with pytest.raises(ValueError, match="closed"):
            write_on()
        closing.join()
        assert all(future.result() == BLOCK for future in futures)
