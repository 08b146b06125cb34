"""A pool that leases pinned memory for transfers within a byte budget."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from deepnvme.ops import load_async_io
from deepnvme.telemetry.descriptions import representation, size_for_people
from deepnvme.telemetry.sizes import ByteCount, byte_count

from .alignment import PAGE, padded
from .budget import MemoryBudget, budget_bytes
from .chunks import ChunkList, Claim, Holder, PinnedChunk
from .lease import Lease, Transfer
from .system_memory import available_memory

Result = TypeVar("Result")

__all__ = ["BufferPool", "Lease", "OutOfBuffers", "buffer_pool", "set_buffer_budget"]

_LINGER_SECONDS = 1.0
"""How long a tensor over an ended lease may still be referenced by the stack of a thread that has finished with it."""
_LOOKED_FOR = 64 << 20
"""Bytes from which on it is asked whether the machine has them: asking takes up to 2 ms, and clearing so many pages 15."""
_POLL_SECONDS = 0.001
"""How often a waiting thread polls the futures that leases are released after: short beside any transfer worth waiting for."""
_LOOK_SECONDS = 0.01
"""How often a waiting thread checks the pool without being woken.

Nothing wakes it when a tensor is dropped that outlived its lease, when a thread ends that has leases, or when a thread was
interrupted just before it would have woken the others.
"""


class OutOfBuffers(MemoryError):
    """The budget does not allow a lease, and other threads cannot change that by releasing theirs."""


class _Lingering:
    """Ends when no tensor over a chunk is left, or after a second.

    It is awaited when a lease has ended (or the future that it was released after) while somebody still has a tensor over the
    memory. That may be the thread that used the tensor, or that set the future's result, and is about to drop it: this gives it
    time.
    """

    __slots__ = ("_holder", "_until")

    def __init__(self, holder: Callable[[], object]) -> None:
        self._holder = holder
        self._until = time.monotonic() + _LINGER_SECONDS

    def done(self) -> bool:
        """Return whether no tensor is left, or the time is over."""
        return self._holder() is None or time.monotonic() >= self._until

    def exception(self, timeout: float | None = None) -> None:
        """Return None; it has no errors."""


class _Waiter:
    """A thread's place in the queue for memory."""

    __slots__ = ("kept", "left", "nbytes", "thread", "wake")

    def __init__(self, nbytes: int, thread: threading.Thread, kept: frozenset[object]) -> None:
        self.nbytes = nbytes
        self.thread = thread
        self.kept = kept
        """Chunks that are not given back while the thread waits, whichever thread leased them."""
        self.left = False
        # A SimpleQueue is the only way to wake a thread that a finalizer may use: its put() may run in the middle of any other
        # call, even one of the same queue.
        self.wake: queue.SimpleQueue[None] = queue.SimpleQueue()


class BufferPool:
    """Leases pinned memory, and keeps what is in use or free for reuse within a budget.

    Pinning takes about 0.3 s for each GB. So released memory is kept for requests of about the same size, and unpinned when its
    room is needed for others, or by :meth:`trim`.

    Thread-safe. A process forked from this one must make its own pool: in it, every method of this one raises RuntimeError. Only
    the leases that it inherited can be released, which has no effect.

    Args:
        budget: A :data:`MemoryBudget`: bytes, "8GB", "25%" or "auto"; None for half of what the machine and the process's
            control groups have available now. A lease takes whole pages of 4096 bytes out of the budget, and up to 1/8 more if
            it reuses free memory of about its size. Memory beyond RLIMIT_MEMLOCK can be used too, but the system may swap it
            out; a RuntimeWarning says so once, when it is pinned.

    Raises:
        TypeError, ValueError: For a budget that is none.
    """

    # A lease can end anywhere, even in a finalizer that the garbage collector runs in the middle of one of these methods. So the
    # end of a lease takes no lock: it is recorded in _awaited or _ended, each in one step of the interpreter, and waiting threads
    # are woken. All other state is changed with the lock held, by threads that call a public method; these begin with _settle,
    # which polls the futures, and _take_back.
    #
    # Ctrl-C may interrupt any of this at any point, and no memory stays in use because of it. A Claim is made before a chunk is
    # chosen, and any exception gives it up. When the lease is made, one assignment replaces the Claim by a Holder. The
    # interpreter itself records that the last tensor over the lease is gone, in a callback that is no Python code. Entries are
    # removed from _ended and _awaited only after they have been handled, so that work that was interrupted is done again.

    def __init__(self, budget: MemoryBudget | None = None) -> None:
        nbytes = available_memory() // 2 if budget is None else budget_bytes(budget, "budget")
        self._chunks = ChunkList(nbytes)
        self._generation = _generation
        self._lock = threading.Lock()
        self._awaited: dict[PinnedChunk, Transfer] = {}  # lent chunks, and what each is given back after
        self._ended: deque[Any] = deque()  # holders of chunks to check: nothing is awaited any more, or no view is left
        self._waiting: tuple[_Waiter, ...] = ()  # in order of arrival; replaced, never changed, since finalizers iterate over it

    @property
    def budget(self) -> int:
        """Bytes that leases and free memory kept for reuse may take together."""
        return self._chunks.budget

    @property
    def waiting(self) -> int:
        """Number of threads that wait for a lease."""
        return len(self._waiting)

    def set_budget(self, nbytes: MemoryBudget) -> None:
        """Change the budget, and unpin free memory beyond it.

        Leases stay valid if the budget falls below what is in use; nothing new is leased until enough was given back.

        Args:
            nbytes: Bytes, "8GB", "25%" or "auto": see :data:`MemoryBudget`. What the pool has pinned already counts as
                available for a share.

        Raises:
            TypeError, ValueError: For a budget that is none.
        """
        budget = budget_bytes(nbytes, "nbytes", lambda: available_memory() + self.allocated)
        self._call(lambda chunks: chunks.set_budget(budget))
        self._wake()

    @property
    def in_use(self) -> int:
        """Bytes that are leased, or that tensors over ended leases still refer to."""
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
            lambda: "{} in use, {} kept for reuse".format(*map(size_for_people, self._chunks.last_counted)),
            lambda: f"{self.waiting} waiting" if self.waiting else "",
            lambda: "" if self._generation == _generation else "of the parent process, not to be used in this one",
        )

    def _call(self, use: Callable[[ChunkList], Result]) -> Result:
        """Return what ``use`` returns for the chunks, after those have become free whose leases have ended."""
        self._settle()
        with self._lock:
            self._take_back()
            return use(self._chunks)

    def lease(self, nbytes: ByteCount, timeout: float | None = None, keeping: Iterable[Lease] = ()) -> Lease:
        """Lease ``nbytes`` bytes of pinned memory; block until the budget has room for them.

        Requests are served in the order of arrival. The exception: if all memory in use belongs to threads that wait here, the
        first request that fits is served.

        Memory counts as leased by the thread that called ``lease``, whichever thread releases it. If another thread is to release
        it, pass that thread's future to :meth:`Lease.release`. Memory leased by a thread that has ended may be released by any
        other thread.

        Args:
            nbytes: Bytes wanted, or a size such as "64MiB".
            timeout: Seconds to wait; None waits for as long as it takes. Ctrl-C interrupts the waiting.
            keeping: Leases of other threads that count as this thread's while it waits, because they will not be released before.

        Raises:
            TimeoutError: If the budget has no room within ``timeout``.
            OutOfBuffers: At once, if waiting cannot help: the budget is smaller than ``nbytes``, the system has not that much
                memory, or all memory in use was leased by this thread or by others that wait here, and none of it is to be
                released after a future. Tensors over ended leases are given a second to be dropped. If memory in use was leased
                by threads that have ended, and no other thread is running, the error comes within a second.
            TypeError, ValueError: If ``nbytes`` is no number of bytes, or negative.
        """
        wanted = byte_count(nbytes, "nbytes")
        lease = self._try_lease(wanted)
        return self._wait(wanted, timeout, keeping) if lease is None else lease

    def try_lease(self, nbytes: ByteCount) -> Lease | None:
        """Like :meth:`lease`, but return None instead of waiting or raising OutOfBuffers for the budget.

        Blocks only to pin the memory, if none that is free fits.
        """
        return self._try_lease(byte_count(nbytes, "nbytes"))

    def _try_lease(self, nbytes: int) -> Lease | None:
        self._settle()
        if nbytes == 0:  # there is no memory to give back
            import torch

            return Lease(torch.empty(0, dtype=torch.uint8, device="cpu"), lambda after: None)
        size = padded(nbytes, PAGE)
        claim = Claim()
        try:
            with self._lock:
                self._take_back()
                if self._queue() or not self._chunks.fits(size):
                    return None
                chunk = self._chunks.lend(size, claim)
            return self._lend(chunk, nbytes)
        except BaseException:
            self._give_up(claim)
            raise

    def _wait(self, nbytes: int, timeout: float | None, keeping: Iterable[Lease]) -> Lease:
        """Queue for memory, and lease it when it is this thread's turn. Parameters and errors are those of :meth:`lease`."""
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        kept = frozenset(lease._chunk for lease in keeping if lease._buffer is not None)
        waiter = _Waiter(padded(nbytes, PAGE), threading.current_thread(), kept)
        claim = Claim()
        try:
            with self._lock:
                self._waiting += (waiter,)
            while True:
                self._settle()
                with self._lock:
                    self._take_back()
                    following = self._following()
                    if following is waiter:
                        chunk = self._chunks.lend(waiter.nbytes, claim)
                        waiter.left = True  # in the same step: a thread that has memory no longer counts as waiting
                        self._queue()
                        break
                    if waiter.nbytes > self._chunks.budget:
                        raise OutOfBuffers(self._shortage(nbytes))
                    left = deadline - time.monotonic()
                    if following is None and self._stuck():
                        raise OutOfBuffers(self._shortage(nbytes, ", all held by this thread or by others that wait here"))
                    if left <= 0:
                        raise TimeoutError(self._shortage(nbytes, f", after waiting for {timeout} s"))
                    pause = min(left, _POLL_SECONDS if self._awaited else _LOOK_SECONDS)
                if following is not None:
                    following.wake.put(None)  # this thread's waiting may have made it the other one's turn
                with contextlib.suppress(queue.Empty):
                    waiter.wake.get(timeout=pause)
            self._wake()
            return self._lend(chunk, nbytes)
        except BaseException:
            waiter.left = True
            self._give_up(claim)
            with self._lock:
                self._queue()
            raise

    def _lend(self, chunk: PinnedChunk, nbytes: int) -> Lease:
        """Return a lease over a chunk that was lent to this thread, pinned first if it is new."""
        import torch

        if chunk.memory is None:
            chunk.memory = self._pin(chunk.nbytes)
        view = memoryview(chunk.memory)
        with torch.inference_mode(False):  # a tensor made in inference mode cannot be written to outside of it
            buffer = torch.frombuffer(view, dtype=torch.uint8, count=nbytes)
        holder = Holder(view, self._ended.append)
        holder.chunk = chunk
        lease = Lease(buffer, functools.partial(self._give_back, chunk, holder), chunk)
        chunk.holder = holder  # replaces the claim; from here on, nothing is called that could be interrupted
        return lease

    def _pin(self, nbytes: int) -> Any:
        """Pin new memory. If the system has none left, free chunks are unpinned first."""
        try:
            return pinned(nbytes)
        except OutOfBuffers:
            self.trim()
        return pinned(nbytes)

    def _settle(self) -> None:
        """Poll the futures that leases are released after. Raises RuntimeError in a forked child.

        Must be called without the lock: what a future does when it is asked is unknown.
        """
        if self._generation != _generation:
            raise RuntimeError("the buffer pool is the parent process's: use this process's buffer_pool(), or make another one")
        if self._awaited and self._ask():
            self._ask()  # the first round dropped futures, and these may have kept tensors alive

    def _ask(self) -> bool:
        """Poll the futures once. Return whether any had ended."""
        ended = [(chunk, after) for chunk, after in self._awaited.copy().items() if _has_ended(chunk, after)]
        with self._lock:
            for chunk, after in ended:
                if self._awaited.get(chunk) is not after:
                    continue  # another thread has handled it, and the chunk may have been lent again since
                if chunk.holder() is not None and not isinstance(after, _Lingering):
                    self._awaited[chunk] = _Lingering(chunk.holder)
                else:
                    self._ended.append(chunk.holder)
                    del self._awaited[chunk]
        return bool(ended)

    # Called without the lock, also from finalizers.

    def _give_back(self, chunk: PinnedChunk, holder: Callable[[], object], after: Transfer | None) -> None:
        """Record that a lease has ended.

        With ``after``, the lease still has its memory now. Without, it has none any more, and the chunk may already belong to
        another.
        """
        if after is not None:
            self._awaited[chunk] = after
        elif chunk.holder is holder and holder() is not None:
            self._awaited.setdefault(chunk, _Lingering(holder))
        self._wake()

    def _give_up(self, claim: Claim) -> None:
        """Give up a claim after an exception, so that its chunk, if it has one, is taken back."""
        claim.given_up = True
        self._ended.append(claim)
        self._wake()

    def _wake(self) -> None:
        """Have all threads that wait for memory look again whether there is enough."""
        for waiter in self._waiting:
            waiter.wake.put(None)

    # Called with the lock held.

    def _take_back(self) -> None:
        """Make the chunks free whose leases have ended and that no tensor refers to."""
        while self._ended:
            holder = self._ended[0]
            chunk = getattr(holder, "chunk", None)  # a claim may have been given up before it had a chunk
            if chunk in self._chunks.lent and chunk.holder is holder and holder() is None and chunk not in self._awaited:
                self._chunks.take_back(chunk)
            self._ended.popleft()  # if not taken back, it is still in use, or was taken back before and may be lent again

    def _queue(self) -> tuple[_Waiter, ...]:
        """Return the waiting threads, in order of arrival, after removing those that have left."""
        if any(waiter.left for waiter in self._waiting):
            self._waiting = tuple(waiter for waiter in self._waiting if not waiter.left)
        return self._waiting

    def _stuck(self) -> bool:
        """Return whether no thread can give memory back.

        That is so if all chunks in use are referred to, await no future, and belong to waiting threads.
        """
        if self._awaited or not all(chunk.holder() for chunk in self._chunks.lent):
            return False
        waiting = {waiter.thread for waiter in self._queue()}
        kept = {chunk for waiter in self._queue() for chunk in waiter.kept}
        owners = {chunk.owner for chunk in self._chunks.lent if chunk not in kept} - waiting
        if any(owner is not None and owner.is_alive() for owner in owners):
            return False
        return not owners or waiting.issuperset(threading.enumerate())

    def _following(self) -> _Waiter | None:
        """Return the waiter whose turn it is, if its request fits now; else None.

        It is the first one's turn, so that no large request starves; if the pool is stuck, the turn of the first whose request
        fits.
        """
        candidates = self._queue() if self._stuck() else self._queue()[:1]
        return next((waiter for waiter in candidates if self._chunks.fits(waiter.nbytes)), None)

    def _shortage(self, nbytes: int, circumstances: str = "") -> str:
        """Return the message of an error about a request of ``nbytes`` bytes."""
        size, budget, in_use = padded(nbytes, PAGE), self._chunks.budget, self._chunks.lent_bytes
        enough = size if size > budget else size + in_use
        return (
            f"{nbytes} bytes of buffers are wanted; of the budget of {budget} bytes, {in_use} are in use"
            f"{circumstances}: set a budget of at least {enough} (deepnvme.swap.set_buffer_budget), "
            "or release leases and drop the tensors over them"
        )


def pinned(nbytes: int) -> Any:
    """Pin new memory. Raises OutOfBuffers if the machine, or a control group of the process, has not so much."""
    # Pages that a control group has not, its kernel kills for, without an error.
    if nbytes >= _LOOKED_FOR and nbytes > (available := available_memory()):
        raise OutOfBuffers(
            f"{size_for_people(nbytes)} of memory are to be pinned, and {size_for_people(available)} are available to this"
            " process: give a smaller memory budget, or free some memory"
        )
    try:
        return load_async_io().empty_pinned(nbytes)
    except MemoryError as error:
        raise OutOfBuffers(f"the system has no {nbytes} bytes of memory to pin: free some of it, or want less") from error


def _has_ended(chunk: PinnedChunk, after: Transfer) -> bool:
    """Return whether a future has ended.

    One that raises counts as ended: if its transfer still goes on, the storages of the transfer keep the memory alive.
    """
    try:
        if not after.done():
            return False
        if chunk.holder() is not None:
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
