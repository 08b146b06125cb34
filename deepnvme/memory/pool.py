"""A pool that leases pinned memory for transfers within a byte budget."""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import Any, NoReturn, TypeVar

from deepnvme._interrupts import defer_interrupts
from deepnvme._polling import TRANSFER_POLL_SECONDS
from deepnvme.ops import load_async_io
from deepnvme.telemetry.descriptions import representation, size_for_people
from deepnvme.telemetry.sizes import ByteCount, byte_count

from .alignment import PAGE, padded
from .budget import MemoryBudget, budget_bytes
from .chunks import ChunkList, LeaseViewRef, PinnedChunk
from .lease import Lease, Transfer
from .system_memory import available_memory

Result = TypeVar("Result")

__all__ = ["BufferPool", "Lease", "OutOfBuffers", "buffer_pool", "set_buffer_budget"]

LEASE_TIMEOUT_SECONDS = 30.0
"""Default seconds that a new lease waits for other leases to be released: far longer than any transfer takes."""
_FIRST_POLL_SECONDS = 0.00005
"""Seconds until a waiting thread polls the pool for the first time.

Later intervals are longer by 1/16 of the time waited so far, up to TRANSFER_POLL_SECONDS. Measured with two threads, on a
busy machine: released memory reaches the waiting thread after 0.05 ms where it waits 0.5 ms, and 0.4 ms where it waits 10
ms. Polling each 1 ms took 0.6 and 1.2 ms, a condition variable 0.03 and 0.07 ms.
"""
_CHECKED_FROM = 64 << 20
"""Bytes from which a request is first checked against the available memory. That takes 2 ms; clearing the pages takes 15 ms."""
_PASS_THROUGH_MODULES = ("deepnvme.memory.", "deepnvme.cache.", "deepnvme.transfer.")
"""Prefixes of modules that lease memory for their callers. Errors name the caller's module instead."""


class OutOfBuffers(MemoryError):
    """The buffer pool has no room for a lease, and not enough memory was released in time.

    Also raised if the system has too little memory to pin.
    """


class BufferPool:
    """Leases pinned memory within a byte budget, and keeps released memory for reuse.

    Pinning takes about 0.3 s for each GB. So released memory stays pinned for requests of about the same size. It is unpinned
    when the budget has no room for another request, or by :meth:`trim`.

    Thread-safe. A process forked from this one must make its own pool: in the child, every method of the parent's pool raises
    RuntimeError. Leases that the child inherited can be released, which has no effect.

    Args:
        budget: A :data:`MemoryBudget`: bytes, "8GB", "25%" or "auto"; None for half of what the machine and the process's
            control groups have available now. A lease takes whole pages of 4096 bytes out of the budget, and up to 1/8 more
            if it reuses free memory of about its size. Memory beyond RLIMIT_MEMLOCK can be used too, but the system may swap
            it out; a RuntimeWarning says so once, when such memory is pinned.

    Raises:
        TypeError, ValueError: If ``budget`` is not a valid budget.
    """

    # 1. The garbage collector may run a finalizer that ends a lease in the middle of any method here. So the end of a lease takes
    #    no lock: it is recorded in _awaited or _ended, each in one step of the interpreter, and the next call of a public method
    #    takes the memory back.
    # 2. All other state is changed with the lock held and interrupts deferred.
    # 3. A finalizer cannot notify a condition, and nobody is told when a transfer in _awaited ends. So a thread that waits polls.

    def __init__(self, budget: MemoryBudget | None = None) -> None:
        nbytes = available_memory() // 2 if budget is None else budget_bytes(budget, "budget")
        self._chunks = ChunkList(nbytes)
        self._generation = _generation
        self._lock = threading.Lock()
        self._awaited: dict[PinnedChunk, Transfer] = {}  # lent chunks, and what each is given back after
        self._ended: deque[LeaseViewRef] = deque()  # chunks to check: no tensor over them is left, or nothing is awaited any more
        self._waiting: list[threading.Thread] = []  # in order of arrival

    @property
    def budget(self) -> int:
        """Bytes that leases and free memory kept for reuse may take together."""
        return self._chunks.budget

    @property
    def waiting(self) -> int:
        """Number of threads that wait for a lease."""
        return len(self._waiting)

    def set_budget(self, nbytes: MemoryBudget) -> None:
        """Change the budget, and unpin free memory that exceeds it.

        Leases stay valid if the budget falls below the bytes in use; nothing new is leased until enough memory was released.

        Args:
            nbytes: Bytes, "8GB", "25%" or "auto": see :data:`MemoryBudget`. Memory that the pool has pinned already counts as
                available for a share.

        Raises:
            TypeError, ValueError: If ``nbytes`` is not a valid budget.
        """
        budget = budget_bytes(nbytes, "nbytes", lambda: available_memory() + self.allocated)
        self._call(lambda chunks: chunks.set_budget(budget))

    @property
    def in_use(self) -> int:
        """Bytes that are leased, or that tensors still refer to after their lease has ended."""
        return self._call(lambda chunks: chunks.lent_bytes)

    @property
    def allocated(self) -> int:
        """Bytes that are pinned, in use or kept for reuse. Never more than the budget, except after it was lowered."""
        return self._call(lambda chunks: chunks.allocated)

    def trim(self) -> None:
        """Unpin all memory that is not in use."""
        self._call(lambda chunks: chunks.unpin_down_to(0))

    def __repr__(self) -> str:
        return representation(
            self,
            lambda: f"budget={size_for_people(self.budget)}",
            lambda: f"{size_for_people(self._in_use_now())} in use",
            lambda: f"{size_for_people(self._chunks.free_bytes)} kept for reuse",
            lambda: f"{self.waiting} waiting" if self.waiting else "",
            lambda: "" if self._generation == _generation else "of the parent process, not to be used in this one",
        )

    def _in_use_now(self) -> int:
        """Return :attr:`in_use`; in a forked child, or while a method of the pool runs, as the last call left it."""
        return self._chunks.lent_bytes if self._generation != _generation or self._lock.locked() else self.in_use

    def _call(self, use: Callable[[ChunkList], Result]) -> Result:
        """Free the chunks whose leases have ended, then return ``use(chunks)`` with the lock held."""
        if self._generation != _generation:
            raise RuntimeError("the buffer pool is the parent process's: use this process's buffer_pool(), or make another one")
        if self._awaited:
            self._collect_ended()
        with defer_interrupts(), self._lock:
            while self._ended:
                view = self._ended.popleft()
                # It may have been taken back before, and lent again, or still be in use.
                if view.chunk.last_view is view and view() is None and view.chunk not in self._awaited:
                    self._chunks.take_back(view.chunk)
            return use(self._chunks)

    def lease(self, nbytes: ByteCount, timeout: float | None = LEASE_TIMEOUT_SECONDS) -> Lease:
        """Lease ``nbytes`` bytes of pinned memory. If the budget has no room, wait for other leases to be released.

        Requests are served in the order of arrival, except that threads which already have leases come first: other threads
        may be waiting for these threads to release them.

        Args:
            nbytes: Bytes wanted, or a size such as "64MiB".
            timeout: Seconds to wait; None waits without a limit. Ctrl-C interrupts the wait.

        Raises:
            OutOfBuffers: If the budget has no room within ``timeout``; the message says who has leased how much. Raised at
                once if waiting cannot help: the budget is smaller than ``nbytes``, the system has too little memory, or all
                memory in use is leased by the calling thread and no lease is to be released after a transfer.
            TypeError, ValueError: If ``nbytes`` is not a valid size, or negative.
        """
        wanted = byte_count(nbytes, "nbytes")
        lease = self._lease(wanted, waited=False)
        if lease is not None:
            return lease
        self.ensure_possible(wanted)
        thread, begun = threading.current_thread(), time.monotonic()
        until = math.inf if timeout is None else begun + timeout
        while lease is None:
            with defer_interrupts() as interrupts:
                self._waiting.append(thread)
                try:
                    while (lease := self._lease(wanted, waited=True)) is None and not interrupts:
                        if time.monotonic() >= until:
                            self._call(lambda chunks: self._raise_shortage(wanted, f", after waiting for {timeout} s"))
                        time.sleep(min(_FIRST_POLL_SECONDS + (time.monotonic() - begun) / 16, TRANSFER_POLL_SECONDS))
                finally:
                    self._waiting.remove(thread)
        return lease

    def try_lease(self, nbytes: ByteCount) -> Lease | None:
        """Like :meth:`lease`, but return None if the budget has no room, instead of waiting or raising OutOfBuffers.

        Blocks only while new memory is pinned, if no free memory fits.
        """
        return self._lease(byte_count(nbytes, "nbytes"), waited=False)

    def ensure_possible(self, nbytes: ByteCount, held: Iterable[Lease] = ()) -> None:
        """Raise OutOfBuffers if the budget has no room for a lease, and no other thread can make room.

        Args:
            nbytes: Bytes of the lease, or a size such as "64MiB".
            held: Leases that count as the calling thread's, whichever thread leased them.
        """
        wanted = byte_count(nbytes, "nbytes")
        thread, own = threading.current_thread(), {lease._chunk for lease in held}

        def check(chunks: ChunkList) -> None:
            size = padded(wanted, PAGE)
            others = self._awaited or any(chunk.thread is not thread and chunk not in own for chunk in chunks.lent)
            if size > chunks.budget or not (others or chunks.fits(size)):
                self._raise_shortage(wanted, ", all leased by this thread" if chunks.lent and not others else "")

        self._call(check)

    def _lease(self, nbytes: int, waited: bool) -> Lease | None:
        """Return a lease, or None if the budget has no room or, unless ``waited``, others wait."""
        import torch

        size, thread = padded(nbytes, PAGE), threading.current_thread()

        def lend(chunks: ChunkList) -> PinnedChunk | None:
            if nbytes == 0:
                return PinnedChunk(0)
            first = self._waiting[0] is thread if waited else not self._waiting
            if not chunks.fits(size) or not (first or (waited and any(chunk.thread is thread for chunk in chunks.lent))):
                return None
            return chunks.lend(size, thread, _caller())

        with defer_interrupts():
            chunk = self._call(lend)
            if chunk is None:
                return None
            if nbytes == 0:  # there is no memory to give back
                return Lease(torch.empty(0, dtype=torch.uint8, device="cpu"), chunk, {})
            try:
                if chunk.memory is None:
                    chunk.memory = self._pin(chunk.nbytes)
                view = memoryview(chunk.memory)
                with torch.inference_mode(False):  # a tensor made in inference mode cannot be written to outside of it
                    buffer = torch.frombuffer(view, dtype=torch.uint8, count=nbytes)
            except BaseException:
                self._call(lambda chunks: chunks.take_back(chunk))
                raise
            chunk.last_view = LeaseViewRef(view, self._ended.append)
            chunk.last_view.chunk = chunk
            return Lease(buffer, chunk, self._awaited)

    def _pin(self, nbytes: int) -> Any:
        """Pin new memory. If the system has none left, free chunks are unpinned first."""
        try:
            return pinned(nbytes)
        except OutOfBuffers:
            self.trim()
        return pinned(nbytes)

    def _collect_ended(self) -> None:
        """Poll the transfers that pending releases wait for. Called without the lock: a transfer's methods may run any code."""
        ended = [(chunk, after) for chunk, after in self._awaited.copy().items() if _has_ended(chunk, after)]
        with defer_interrupts(), self._lock:
            for chunk, after in ended:
                if self._awaited.get(chunk) is after:  # else another thread has handled it, and the chunk may be lent again
                    del self._awaited[chunk]
                    if chunk.last_view is not None:
                        self._ended.append(chunk.last_view)

    def _raise_shortage(self, nbytes: int, circumstances: str) -> NoReturn:
        """Raise OutOfBuffers for a request of ``nbytes`` bytes. Call with the lock held."""
        size, budget, in_use = padded(nbytes, PAGE), self._chunks.budget, self._chunks.lent_bytes
        enough = size if size > budget else size + in_use
        holders: Counter[str] = Counter()
        for chunk in self._chunks.lent:
            released = "transfers under way" if chunk in self._awaited else "tensors that outlived their lease"
            holders[chunk.caller if chunk.thread is not None else released] += chunk.nbytes
        most = "; ".join(f"{held} by {holder}" for holder, held in holders.most_common(5))
        raise OutOfBuffers(
            f"{nbytes} bytes of buffers are wanted; of the budget of {budget} bytes, {in_use} are in use{circumstances}"
            f"{f' ({most})' if most else ''}: set a budget of at least {enough} (deepnvme.memory.set_buffer_budget), "
            "or release leases and drop the tensors over them"
        )


def _caller() -> str:
    """Return the names of the module and thread that ask for a lease, for error messages."""
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(_PASS_THROUGH_MODULES):
        frame = frame.f_back
    return f"{frame.f_globals.get('__name__')}, line {frame.f_lineno}, in {threading.current_thread().name}"


def pinned(nbytes: int) -> Any:
    """Pin new memory. Raises OutOfBuffers if the machine, or a control group of the process, has too little."""
    # The kernel kills a process that touches more pages than its control group allows, without an error.
    if nbytes >= _CHECKED_FROM and nbytes > (available := available_memory()):
        raise OutOfBuffers(
            f"{size_for_people(nbytes)} of memory are to be pinned, and {size_for_people(available)} are available to this"
            " process: give a smaller memory budget, or free some memory"
        )
    try:
        return load_async_io().empty_pinned(nbytes)
    except MemoryError as error:
        raise OutOfBuffers(f"the system has no {nbytes} bytes of memory to pin: free some of it, or lease less") from error


def _has_ended(chunk: PinnedChunk, after: Transfer) -> bool:
    """Return whether a transfer has ended.

    A transfer whose methods raise counts as ended: if it is still in progress, its storages keep the memory alive.
    """
    try:
        if not after.done():
            return False
        if chunk.last_view is not None and chunk.last_view() is not None:
            after.exception()  # an engine's future drops its tensor when it is asked
    except Exception:
        pass
    return True


_pool: BufferPool | None = None
_pool_lock = threading.Lock()
_generation = 0  # how many forks lie between this process and the one that imported this


def buffer_pool() -> BufferPool:
    """Return the process's buffer pool, made on first use.

    A forked child has its own pool, which starts empty with its parent's budget.
    """
    global _pool
    with _pool_lock:
        if _pool is None:
            _pool = BufferPool()
        return _pool


def set_buffer_budget(nbytes: MemoryBudget) -> None:
    """Set the budget of the process's pool: bytes, "8GB", "25%" or "auto". See :meth:`BufferPool.set_budget`."""
    buffer_pool().set_budget(nbytes)


def _after_fork() -> None:
    """Give a forked child a pool of its own, and locks that no thread of the parent holds."""
    global _pool, _pool_lock, _generation
    _generation += 1
    _pool_lock = threading.Lock()
    _pool = _pool and BufferPool(_pool.budget)


os.register_at_fork(after_in_child=_after_fork)
