"""Ctrl-C at every point of the pool's operations: nothing stays in use, and nobody waits for who is gone."""

from __future__ import annotations

import concurrent.futures
import threading
import time
import weakref
from collections.abc import Callable, Iterator

import pytest

from deepnvme.swap import BufferPool, Lease

from ..faults.torture.interruption import Interruption
from ..support.patience import PATIENCE, until

PAGE = 4096


def use(pool: BufferPool) -> None:
    with pool.lease(3 * PAGE) as lease:
        lease.buffer[0] = 1


def lease_and_drop(pool: BufferPool) -> None:
    pool.lease(3 * PAGE)


def release_after(pool: BufferPool) -> None:
    future: concurrent.futures.Future[int] = concurrent.futures.Future()
    future.set_result(1)
    pool.lease(2 * PAGE).release(after=future)
    pool.lease(8 * PAGE).release()


def make_room(pool: BufferPool) -> None:
    for pages in (4, 7, 10):
        pool.lease(pages * PAGE).release()
    pool.trim()


def change_the_budget(pool: BufferPool) -> None:
    pool.lease(9 * PAGE).release()
    pool.set_budget(5 * PAGE)
    pool.set_budget(10 * PAGE)


def wait_for_another(pool: BufferPool) -> None:
    """Memory of another thread comes back while this one waits."""
    with concurrent.futures.ThreadPoolExecutor(1) as other:
        theirs = other.submit(pool.lease, 6 * PAGE).result()
        end: concurrent.futures.Future[int] = concurrent.futures.Future()
        try:
            theirs.release(after=end)
            other.submit(lambda: (time.sleep(0.002), end.set_result(1)))
            pool.lease(6 * PAGE).release()
        finally:
            theirs.release()
            other.submit(lambda: end.done() or end.set_result(1))


def give_up_waiting(pool: BufferPool) -> None:
    with concurrent.futures.ThreadPoolExecutor(1) as other:
        theirs = other.submit(pool.lease, 6 * PAGE).result()
        try:
            pool.lease(6 * PAGE, timeout=0.002)
        except TimeoutError:
            pass
        finally:
            theirs.release()


OPERATIONS = [use, lease_and_drop, release_after, make_room, change_the_budget, wait_for_another, give_up_waiting]


def points(pool: BufferPool, operation: Callable[[BufferPool], None]) -> Iterator[tuple[Interruption, KeyboardInterrupt]]:
    """Each with the error, whose traceback keeps the frames that were interrupted alive."""
    operation(pool)  # what is only done once
    number = 0
    while True:
        number += 1
        interruption = Interruption(number, skip=(concurrent.futures.__path__[0], threading.__file__, weakref.__file__))
        try:
            with interruption:
                operation(pool)
        except KeyboardInterrupt as error:
            assert interruption.where
            yield interruption, error
            continue
        if not interruption.where:
            return
        yield interruption, KeyboardInterrupt()  # it was lost in a finalizer


@pytest.mark.slow
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.__name__)
def test_nothing_stays_in_use(operation: Callable[[BufferPool], None]) -> None:
    pool = BufferPool(10 * PAGE)
    passed = 0
    for interruption, error in points(pool, operation):
        where = interruption.where
        passed += 1
        if where.endswith((" __enter__", " __exit__", " release", " _give_back", " _wake")):
            error.__traceback__ = None  # it keeps the lease, which the caller has by then
        pool.set_budget(10 * PAGE)
        if operation in (wait_for_another, give_up_waiting):
            until(lambda: not pool.in_use)  # the other thread has it still
        assert pool.in_use == 0, where
        assert pool.allocated <= pool.budget, where
        with concurrent.futures.ThreadPoolExecutor(1) as other:  # no lock, and no place in the queue, was kept
            lease: Lease = other.submit(pool.lease, 10 * PAGE, 5).result(PATIENCE)
            assert pool.in_use == 10 * PAGE
            lease.release()
            del lease
    assert passed > 20
