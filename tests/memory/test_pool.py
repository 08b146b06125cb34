"""Leases and their pool: what they promise, and who gets memory when there is not enough for all."""

from __future__ import annotations

import concurrent.futures
import gc
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import deepnvme
from deepnvme.memory import pool as buffers
from deepnvme.swap import BufferPool, Lease, OutOfBuffers

from ..support.patience import PATIENCE, until

PAGE = 4096


@pytest.fixture
def pool() -> BufferPool:
    """Room for 100 pages."""
    return BufferPool(100 * PAGE)


class Started:
    """A call in a thread of its own."""

    def __init__(self, call: Callable[..., Any], *arguments: Any) -> None:
        self.future: concurrent.futures.Future[Any] = concurrent.futures.Future()

        def run() -> None:
            try:
                self.future.set_result(call(*arguments))
            except BaseException as error:
                self.future.set_exception(error)

        self.thread = threading.Thread(target=run, daemon=True)
        self.thread.start()

    def result(self) -> Any:
        return self.future.result(PATIENCE)


def start_waiting(pool: BufferPool, call: Callable[..., Any], *arguments: Any) -> Started:
    """Start a call that leads to one more thread waiting for the pool."""
    before = pool.waiting
    started = Started(call, *arguments)
    until(lambda: pool.waiting != before or started.future.done())
    assert not started.future.done(), f"it did not wait: {started.future}"
    return started


@pytest.fixture
def restless() -> Iterator[None]:
    """Threads take turns as often as can be."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def in_thread(call: Callable[..., Any], *arguments: Any) -> Any:
    return Started(call, *arguments).result()


# A lease


@pytest.mark.parametrize("nbytes", [1, 100, PAGE, PAGE + 1, 100_000, 3 * 2**20 + 1])
def test_a_buffer_is_pinned_bytes_from_a_page_boundary_on(op: ModuleType, nbytes: int) -> None:
    with BufferPool(4 * 2**20).lease(nbytes) as lease:
        buffer = lease.buffer
        assert lease.nbytes == nbytes
        assert buffer.shape == (nbytes,)
        assert buffer.dtype == torch.uint8
        assert buffer.untyped_storage().nbytes() == nbytes
        assert buffer.data_ptr() % PAGE == 0
        assert op.is_pinned(buffer)
        buffer.fill_(7)
        assert int(buffer.sum(dtype=torch.int64)) == 7 * nbytes


@pytest.mark.parametrize(
    ("shape", "dtype", "offset"),
    [
        ((3, 4), torch.float32, 52),
        (7, torch.bfloat16, 2),
        ((), torch.int64, 88),
        ((2, 0), torch.float32, 100),
        (torch.Size([10]), torch.float8_e4m3fn, 90),
    ],
)
def test_a_tensor_is_a_view_of_the_buffer(pool: BufferPool, shape: Any, dtype: torch.dtype, offset: int) -> None:
    lease = pool.lease(100)
    tensor = lease.tensor(shape, dtype, offset)
    assert tensor.shape == torch.empty(shape).shape
    assert tensor.dtype == dtype
    assert tensor.is_contiguous()
    assert tensor.numel() == 0 or tensor.data_ptr() == lease.buffer.data_ptr() + offset


@pytest.mark.parametrize(
    ("shape", "offset", "complaint"),
    [
        ((26,), 0, r"a tensor of \(26,\) torch.float32 at offset 0 must fit in the lease of 100 bytes"),
        ((1,), 100, "must fit"),
        ((-1,), 0, "must fit"),
        ((1,), 2, "offset must be a multiple of 4 bytes, the size of torch.float32, got 2"),
        ((1,), -4, "offset must be a multiple"),
    ],
)
def test_a_tensor_beyond_the_lease_is_refused(pool: BufferPool, shape: Any, offset: int, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        pool.lease(100).tensor(shape, torch.float32, offset)


def test_a_released_lease_has_no_buffer(pool: BufferPool) -> None:
    lease = pool.lease(100)
    lease.release()
    for use in (lambda: lease.buffer, lambda: lease.tensor(1, torch.uint8)):
        with pytest.raises(ValueError, match="the lease of 100 bytes was released"):
            use()
    assert lease.nbytes == 100


def test_releasing_twice_gives_back_once(pool: BufferPool) -> None:
    first, second = pool.lease(PAGE), pool.lease(PAGE)
    first.release()
    first.release(after=concurrent.futures.Future())
    third = pool.lease(PAGE)
    first.release()
    assert pool.in_use == 2 * PAGE
    assert second.buffer.data_ptr() != third.buffer.data_ptr()


def test_a_dropped_lease_is_given_back(pool: BufferPool) -> None:
    lease = pool.lease(PAGE)
    cycle: list[Any] = [pool.lease(PAGE)]
    cycle.append(cycle)
    del lease
    assert pool.in_use == PAGE
    del cycle
    gc.collect()
    assert pool.in_use == 0


# Views that outlive it


VIEWS: dict[str, Callable[[Lease], Any]] = {
    "buffer": lambda lease: lease.buffer,
    "slice": lambda lease: lease.buffer[10:20],
    "tensor": lambda lease: lease.tensor((4, 4), torch.float32, 16).t(),
    "storage": lambda lease: lease.buffer.untyped_storage(),
    "detached": lambda lease: lease.tensor(4, torch.float32).requires_grad_().detach(),
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("dropped", [False, True])
def test_memory_that_a_view_sees_is_not_lent_again(pool: BufferPool, view: str, dropped: bool) -> None:
    lease = pool.lease(60 * PAGE)
    address = lease.buffer.data_ptr()
    kept = VIEWS[view](lease)
    if dropped:
        del lease
    else:
        lease.release()
    assert pool.in_use == 60 * PAGE
    assert pool.try_lease(60 * PAGE) is None
    with pool.lease(40 * PAGE) as other:
        assert other.buffer.data_ptr() != address
    del kept
    assert pool.in_use == 0
    assert pool.lease(60 * PAGE).buffer.data_ptr() == address


def test_a_transfer_keeps_the_memory_of_a_lease_released_too_early(
    pool: BufferPool, faulty: Callable[..., Any], gate: Any, drive: Path
) -> None:
    engine = faulty("threads", gate=gate)
    lease = pool.lease(100 * PAGE)
    future = engine.write(lease.buffer.fill_(5), str(drive / "file"))
    lease.release()
    assert pool.try_lease(100 * PAGE) is None
    gate.release()
    future.result()
    pool.lease(100 * PAGE).buffer.fill_(6)
    assert (drive / "file").read_bytes() == b"\5" * (100 * PAGE)


# After a future


def ended_well(future: concurrent.futures.Future[int]) -> None:
    future.set_result(1)


def ended_badly(future: concurrent.futures.Future[int]) -> None:
    future.set_exception(OSError(5, "EIO"))


def cancelled(future: concurrent.futures.Future[int]) -> None:
    assert future.cancel()


@pytest.mark.parametrize("end", [ended_well, ended_badly, cancelled])
def test_memory_comes_back_when_the_future_has_ended(
    pool: BufferPool, end: Callable[[concurrent.futures.Future[int]], None]
) -> None:
    future: concurrent.futures.Future[int] = concurrent.futures.Future()
    lease = pool.lease(100 * PAGE)
    lease.release(after=future)
    assert pool.in_use == 100 * PAGE
    assert pool.try_lease(PAGE) is None
    end(future)
    assert pool.in_use == 0
    assert pool.try_lease(100 * PAGE) is not None


def test_a_future_that_cannot_answer_holds_nothing_up(pool: BufferPool) -> None:
    class Broken:
        def done(self) -> bool:
            raise RuntimeError("the engine belongs to the parent process")

        def exception(self, timeout: float | None = None) -> BaseException | None:
            raise AssertionError("not asked")

    pool.lease(PAGE).release(after=Broken())
    assert pool.in_use == 0


def test_a_transfer_that_nobody_looks_at_gives_back_its_memory(pool: BufferPool, engine: deepnvme.Engine, drive: Path) -> None:
    """The engine keeps the tensor until its future is asked, or it is given something else to do."""
    lease = pool.lease(100 * PAGE)
    lease.release(after=engine.write(lease.buffer, drive / "file"))
    with pool.lease(100 * PAGE, timeout=PATIENCE):
        pass


@pytest.mark.parametrize("seconds", [0, 0.05])
def test_a_lease_waits_for_a_future_when_nobody_else_can_give_back(pool: BufferPool, seconds: float) -> None:
    future: concurrent.futures.Future[int] = concurrent.futures.Future()
    kept = pool.lease(30 * PAGE)
    pool.lease(70 * PAGE).release(after=future)
    timer = threading.Timer(seconds, future.set_result, [1])
    begin = time.monotonic()
    timer.start()
    with pool.lease(70 * PAGE, timeout=PATIENCE):
        assert future.done()
    assert time.monotonic() - begin < PATIENCE  # and not when the time is up
    timer.join()
    kept.release()


# Waiting, and not waiting in vain


@pytest.mark.parametrize("viewed", [False, True])
def test_a_waiting_lease_is_woken_when_memory_comes_back(pool: BufferPool, viewed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffers, "TRANSFER_POLL_SECONDS", 10 * PATIENCE)
    lease = pool.lease(60 * PAGE)
    view = lease.buffer if viewed else None
    if viewed:
        lease.release()
    other = start_waiting(pool, pool.lease, 60 * PAGE)
    lease.release()
    del view
    assert other.result().nbytes == 60 * PAGE


def test_more_than_the_budget_is_refused_at_once(pool: BufferPool) -> None:
    expected = (
        "409601 bytes of buffers are wanted; of the budget of 409600 bytes, 0 are in use: set a budget of at least 413696 "
        r"\(deepnvme.memory.set_buffer_budget\)"
    )
    with pytest.raises(OutOfBuffers, match=expected):
        pool.lease(100 * PAGE + 1)
    assert pool.try_lease(100 * PAGE + 1) is None
    pool.set_budget(413696)
    pool.lease(409601).release()


def test_own_leases_are_not_waited_for(pool: BufferPool) -> None:
    lease = pool.lease(60 * PAGE)
    with pytest.raises(OutOfBuffers, match=r"245760 are in use, all leased by this thread \(245760 by tests.*at least 491520"):
        pool.lease(60 * PAGE)
    assert pool.try_lease(60 * PAGE) is None
    pool.set_budget(491520)
    assert pool.lease(60 * PAGE).buffer.data_ptr() != lease.buffer.data_ptr()


def test_own_leases_are_waited_for_where_more_is_to_come(pool: BufferPool) -> None:
    """A future, a thread with a tensor over an ended lease, or a lease of another thread may make room."""
    future: concurrent.futures.Future[int] = concurrent.futures.Future()
    kept = [pool.lease(40 * PAGE)]
    pool.lease(10 * PAGE).release(after=future)
    pool.ensure_possible(60 * PAGE)
    future.set_result(1)
    view = pool.lease(10 * PAGE).buffer
    pool.ensure_possible(60 * PAGE)
    del view
    with pytest.raises(OutOfBuffers):
        pool.ensure_possible(70 * PAGE)
    kept.append(in_thread(pool.lease, 10 * PAGE))
    pool.ensure_possible(60 * PAGE)
    with pytest.raises(OutOfBuffers):
        pool.ensure_possible(60 * PAGE, held=kept)


def test_out_of_buffers_says_who_has_the_memory(pool: BufferPool, lent: Callable[[int], Lease]) -> None:
    leases = [lent(20 * PAGE), lent(20 * PAGE), pool.lease(30 * PAGE)]
    pool.lease(10 * PAGE).release(after=concurrent.futures.Future())
    view = pool.lease(20 * PAGE).buffer
    with pytest.raises(OutOfBuffers) as caught:
        pool.lease(PAGE, timeout=0.01)
    message = str(caught.value)
    assert f"{40 * PAGE} by concurrent.futures.thread, line " in message
    assert f"{30 * PAGE} by tests.memory.test_pool, line " in message
    assert f"; {10 * PAGE} by transfers under way" in message
    assert f"; {view.nbytes} by tensors that outlived their lease" in message
    del leases


def test_a_future_whose_result_is_a_tensor_over_the_lease_lets_go_of_it(pool: BufferPool) -> None:
    future: concurrent.futures.Future[torch.Tensor] = concurrent.futures.Future()
    lease = pool.lease(100 * PAGE)
    future.set_result(lease.buffer)
    lease.release(after=future)
    del future
    assert pool.in_use == 0


@pytest.fixture
def lent(pool: BufferPool) -> Iterator[Callable[[int], Lease]]:
    """Leases of another thread, which goes on until the end of the test."""
    with concurrent.futures.ThreadPoolExecutor(1) as other:
        yield lambda nbytes: other.submit(pool.lease, nbytes).result()


@pytest.mark.parametrize("nbytes", [10 * PAGE, 100 * PAGE])
def test_small_requests_do_not_overtake_a_large_one(pool: BufferPool, nbytes: int) -> None:
    lease, order = pool.lease(20 * PAGE), []

    def take(nbytes: int) -> None:
        with pool.lease(nbytes):
            order.append(nbytes)

    large = start_waiting(pool, take, 100 * PAGE)
    small = start_waiting(pool, take, nbytes)
    assert pool.try_lease(10 * PAGE) is None
    lease.release()
    large.result()
    small.result()
    assert order == [100 * PAGE, nbytes]
    assert pool.try_lease(10 * PAGE) is not None


def test_a_request_that_those_in_front_depend_on_goes_before_them(pool: BufferPool) -> None:
    """The large one waits for this thread, which waits for the small one: order would stop both."""
    first = pool.lease(50 * PAGE)
    large = start_waiting(pool, pool.lease, 60 * PAGE)
    second = pool.lease(30 * PAGE, timeout=PATIENCE)
    assert not large.future.done()
    first.release()
    second.release()
    assert large.result().nbytes == 60 * PAGE


@pytest.mark.parametrize("timeout", [0, 0.05, -1])
def test_waiting_ends_after_the_timeout(pool: BufferPool, lent: Callable[[int], Lease], timeout: float) -> None:
    lease = lent(100 * PAGE)
    begin = time.monotonic()
    with pytest.raises(OutOfBuffers, match=rf"4096 bytes .* 409600 are in use, after waiting for {timeout} s"):
        pool.lease(PAGE, timeout=timeout)
    assert max(0, timeout) <= time.monotonic() - begin < PATIENCE
    lease.release()
    pool.lease(100 * PAGE, timeout=0).release()


def test_who_gave_up_holds_nobody_up(pool: BufferPool) -> None:
    lease = pool.lease(50 * PAGE)
    large = start_waiting(pool, pool.lease, 100 * PAGE, 0.1)
    small = start_waiting(pool, pool.lease, 50 * PAGE)
    with pytest.raises(OutOfBuffers):
        large.result()
    assert small.result().nbytes == 50 * PAGE
    lease.release()


def test_ctrl_c_interrupts_waiting(pool: BufferPool, lent: Callable[[int], Lease]) -> None:
    lease = lent(100 * PAGE)
    timer = threading.Timer(0.1, signal.pthread_kill, [threading.main_thread().ident, signal.SIGINT])
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        pool.lease(PAGE)
    timer.join()
    lease.release()
    pool.lease(100 * PAGE, timeout=0).release()


# Sizes and the budget


def test_free_chunks_of_other_sizes_make_room(pool: BufferPool) -> None:
    leases = [pool.lease(20 * PAGE) for _ in range(5)]
    others = {leases[index].buffer.data_ptr() for index in (0, 1, 2, 4)}
    for index in (3, 0, 1, 2, 4):
        leases[index].release()
    assert pool.allocated == 100 * PAGE
    with pool.lease(PAGE):
        assert pool.allocated == 81 * PAGE  # the one that was free for longest had to go
        again = [pool.lease(20 * PAGE) for _ in range(4)]
        assert {lease.buffer.data_ptr() for lease in again} == others
        for lease in again:
            lease.release()
    with pool.lease(100 * PAGE):
        assert pool.allocated == 100 * PAGE


def test_trim_unpins_what_is_not_leased(pool: BufferPool) -> None:
    lease = pool.lease(20 * PAGE)
    pool.lease(30 * PAGE).release()
    pool.trim()
    assert (pool.in_use, pool.allocated) == (20 * PAGE, 20 * PAGE)
    lease.release()
    pool.trim()
    assert pool.allocated == 0


# When memory cannot be had


class FailingOp:
    def __init__(self, op: ModuleType, errors: list[BaseException]) -> None:
        self.op, self.errors = op, errors

    def empty_pinned(self, nbytes: int) -> Any:
        if self.errors:
            raise self.errors.pop()
        return self.op.empty_pinned(nbytes)


@pytest.fixture
def failing(op: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[BaseException]:
    """What the next attempts to pin memory raise."""
    errors: list[BaseException] = []
    monkeypatch.setattr(buffers, "load_async_io", lambda: FailingOp(op, errors))
    return errors


def test_free_chunks_are_given_up_when_the_system_has_no_more_memory(pool: BufferPool, failing: list[BaseException]) -> None:
    pool.lease(30 * PAGE).release()
    failing.append(MemoryError())
    with pool.lease(50 * PAGE):
        assert pool.allocated == 50 * PAGE


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_memory_that_cannot_be_pinned_costs_no_room(
    pool: BufferPool, failing: list[BaseException], error: type[BaseException]
) -> None:
    failing += [error(), error()]
    told = "the system has no 409600 bytes of memory to pin" if error is MemoryError else None
    with pytest.raises(error, match=told):
        pool.lease(100 * PAGE)
    failing.clear()
    assert (pool.in_use, pool.allocated) == (0, 0)
    pool.lease(100 * PAGE).release()


# All at once


@pytest.fixture
def busy_collector() -> Iterator[None]:
    """Finalizers run in the midst of everything."""
    before = gc.get_threshold()
    gc.set_threshold(1)
    yield
    gc.set_threshold(*before)


@pytest.mark.usefixtures("busy_collector")
def test_leases_end_in_the_midst_of_the_pools_own_work(pool: BufferPool) -> None:
    for _ in range(300):
        cycle: list[Any] = [pool.lease(random.randrange(1, 9) * PAGE, timeout=PATIENCE)]
        cycle.append(cycle)
        if random.random() < 0.3:
            future: concurrent.futures.Future[int] = concurrent.futures.Future()
            cycle[0].release(after=future)
            future.set_result(1)
        del cycle
    gc.collect()
    assert pool.in_use == 0


@pytest.mark.usefixtures("restless")
def test_threads_share_without_disturbing_each_other(pool: BufferPool) -> None:
    stop = time.monotonic() + 1.5
    executor = concurrent.futures.ThreadPoolExecutor(2)

    def work(seed: int) -> int:
        chance, rounds = random.Random(seed), 0
        while time.monotonic() < stop:
            lease = pool.lease(chance.randrange(1, 60 * PAGE), timeout=PATIENCE)
            lease.buffer[:64].fill_(seed)
            lease.buffer[-64:].fill_(seed)
            assert pool.allocated <= pool.budget
            time.sleep(0.0002 * chance.random())
            ends = torch.cat([lease.buffer[:64], lease.buffer[-64:]])
            assert bool((ends == seed).all())
            end = chance.randrange(4)
            if end == 0:
                lease.release(after=executor.submit(time.sleep, 0.0005))
            elif end == 1:
                lease.release(after=executor.submit(lease.buffer.fill_, seed))
            elif end == 2:
                lease.release()
            del lease
            rounds += 1
        return rounds

    workers = [Started(work, seed) for seed in range(1, 7)]
    assert all(worker.future.result(PATIENCE) > 0 for worker in workers)
    executor.shutdown()
    assert pool.in_use == 0


PAGES = st.integers(0, 70)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("lease"), PAGES, st.integers(0, PAGE - 1)),
        st.tuples(st.just("release"), st.integers(0, 9), st.sampled_from(["now", "after", "drop", "view"])),
        st.tuples(st.just("end"), st.integers(0, 9), st.none()),
        st.tuples(st.just("budget"), st.integers(0, 150), st.none()),
        st.tuples(st.just("trim"), st.just(0), st.none()),
    ),
    max_size=40,
)


@settings(deadline=None)
@given(steps=STEPS)
def test_a_pool_behaves_like_its_model(steps: list[tuple[str, int, Any]]) -> None:
    """The model: what is held, and by what. Leases come where they fit with an eighth to spare, and only where they fit."""
    pool, budget = BufferPool(100 * PAGE), 100 * PAGE
    leases: list[Lease] = []
    pending: list[tuple[int, concurrent.futures.Future[int] | torch.Tensor]] = []  # bytes, and what holds them

    def pages(nbytes: int) -> int:
        return -(-nbytes // PAGE) * PAGE

    for step, number, more in steps:
        if step == "lease":
            nbytes = number * PAGE + more
            least = sum(pages(lease.nbytes) for lease in leases) + sum(nbytes for nbytes, _ in pending)
            lease = pool.try_lease(nbytes)
            if lease is None:
                assert nbytes > 0
                assert (least + pages(nbytes)) * 9 // 8 > budget
            else:
                assert nbytes == 0 or least + pages(nbytes) <= budget
                lease.buffer.fill_(len(leases))
                spans = sorted((each.buffer.data_ptr(), each.nbytes) for each in [*leases, lease] if each.nbytes)
                assert all(begin + size <= after for (begin, size), (after, _) in pairwise(spans))
                leases.append(lease)
            del lease
        elif step == "release" and number < len(leases):
            lease = leases.pop(number)
            if more == "now":
                lease.release()
            elif more == "after":
                future: concurrent.futures.Future[int] = concurrent.futures.Future()
                lease.release(after=future)
                pending.append((pages(lease.nbytes), future))
            elif more == "view":
                pending.append((pages(lease.nbytes), lease.buffer[lease.nbytes // 2 :]))
            del lease
        elif step == "end" and number < len(pending):
            _, holder = pending.pop(number)
            if isinstance(holder, concurrent.futures.Future):
                holder.set_result(0)
            del holder
        elif step == "budget":
            budget = number * PAGE
            pool.set_budget(budget)
        elif step == "trim":
            pool.trim()
            assert pool.allocated == pool.in_use
        least = sum(pages(lease.nbytes) for lease in leases) + sum(nbytes for nbytes, _ in pending)
        assert least <= pool.in_use <= least * 9 // 8
        assert pool.in_use <= pool.allocated <= max(budget, pool.in_use)
    leases.clear()
    for _, holder in pending:
        if isinstance(holder, concurrent.futures.Future):
            holder.set_result(0)
    del pending[:]
    holder = None
    assert pool.in_use == 0


# The process's own


def test_the_process_has_one_pool(interpreters: Any) -> None:
    interpreters.run("""
        import deepnvme.swap
        from deepnvme.memory import pool as buffers
        buffers.available_memory = lambda: 1001
        pool = deepnvme.swap.buffer_pool()
        assert pool is deepnvme.swap.buffer_pool()
        assert pool.budget == 500
        deepnvme.swap.set_buffer_budget(4096)
        assert pool.budget == 4096
    """).check()


FORK = """
import os, threading, time
import deepnvme.swap
from deepnvme.swap import BufferPool

def child(function):
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            answer = str(function())
        except BaseException as error:
            answer = f"{type(error).__name__}: {error}"
        os.write(write, answer.encode())
        os._exit(0)
    os.close(write)
    answer = os.read(read, 10000).decode()
    os.close(read)
    os.waitpid(pid, 0)
    return answer
"""


def test_a_forked_child_is_refused_the_pool_and_has_one_of_its_own(interpreters: Any) -> None:
    calls = ["lease(1)", "lease(0)", "try_lease(1)", "in_use", "allocated", "trim()", "set_budget(1)"]
    interpreters.run(FORK + f"""
import concurrent.futures
deepnvme.swap.set_buffer_budget(409600)
pool = deepnvme.swap.buffer_pool()
leases = [pool.lease(4096), pool.lease(4096), pool.lease(401408)]
leases[0].buffer.fill_(1)
def use():
    for call in {calls!r}:
        try:
            eval("pool." + call)
            return "no error from " + call
        except RuntimeError as error:
            assert str(error).startswith("the buffer pool is the parent process's: use this process's buffer_pool()"), error
    inherited = leases[0].buffer.fill_(2)
    leases.pop().release()
    leases.pop().release(after=concurrent.futures.Future())
    leases.pop()
    own = deepnvme.swap.buffer_pool()
    with own.lease(409600, timeout=5) as lease:
        assert lease.buffer.data_ptr() != inherited.data_ptr()
        return own.in_use, own.budget
assert child(use) == "(409600, 409600)"
assert pool.in_use == 409600
assert int(leases[0].buffer.sum()) == 4096
""").check()  # fmt: skip


def test_a_fork_in_the_midst_of_a_pools_work_hangs_nobody(interpreters: Any) -> None:
    interpreters.run(FORK + """
deepnvme.swap.buffer_pool().lease(4096).release()  # what happens only once, imports above all, survives no fork
stop = False
def work():
    while not stop:
        deepnvme.swap.buffer_pool().lease(4096).release()
        deepnvme.swap.buffer_pool().trim()
threads = [threading.Thread(target=work) for _ in range(2)]
for thread in threads:
    thread.start()
for _ in range(10):
    assert child(lambda: deepnvme.swap.buffer_pool().lease(4096, timeout=5)) == "<Lease of 4096 bytes>"
stop = True
for thread in threads:
    thread.join()
""").check()  # fmt: skip


def test_leases_alive_at_exit_are_no_trouble(interpreters: Any) -> None:
    ended = interpreters.run("""
from deepnvme.swap import buffer_pool
kept = buffer_pool().lease(4096)
view = buffer_pool().lease(4096).buffer
class Late:
    def __del__(self, lease=buffer_pool().lease(4096)):
        lease.release()
late = Late()
late.itself = late
""")
    ended.check()
    assert ended.stderr == ""
