"""Pinned memory for transfers: leases from a pool that keeps to a budget."""

from __future__ import annotations

import contextlib
import functools
import math
import operator
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import TYPE_CHECKING, Any

from .alignment import PAGE, padded
from .available import available_memory
from .chunks import ChunkList, Claim, Holder, PinnedChunk
from .lease import Ending, Lease

if TYPE_CHECKING:
    import torch

__all__ = ["BufferPool", "Lease", "OutOfBuffers", "buffer_pool", "set_buffer_budget"]

_LINGER_SECONDS = 1.0
"""How long tensors over a lease that has ended may still be on the stack of a thread that is done with them."""
_POLL_SECONDS = 0.001
"""How often a waiting thread asks futures whether they have ended: short beside any transfer worth waiting for."""
_LOOK_SECONDS = 0.01
"""How often a waiting thread looks by itself: nobody says so when a tensor goes that was kept beyond its lease, when a thread
that has leased ends, or when one was interrupted that was about to say so."""


class OutOfBuffers(MemoryError):
    """The budget does not allow a lease, and nothing that others do would change that."""


class _Lingering:
    """Awaited where a lease has ended, or the future that it was to end after, and somebody still holds a tensor over it.

    That may be the thread that worked on it or that set the future's result, on its way out: it is given time.
    """

    __slots__ = ("_holder", "_until")

    def __init__(self, holder: Callable[[], object]) -> None:
        self._holder = holder
        self._until = time.monotonic() + _LINGER_SECONDS

    def done(self) -> bool:
        return self._holder() is None or time.monotonic() >= self._until

    def exception(self, timeout: float | None = None) -> None:
        return None


class _Waiter:
    """A thread's place in the queue."""

    __slots__ = ("kept", "left", "nbytes", "thread", "wake")

    def __init__(self, nbytes: int, thread: threading.Thread, kept: frozenset[object]) -> None:
        self.nbytes = nbytes
        self.thread = thread
        self.kept = kept
        """Chunks that are not given back while it waits, whichever thread leased them."""
        self.left = False
        # The one way to wake a thread that a finalizer may use: it can run within any other call, of this object too.
        self.wake: queue.SimpleQueue[None] = queue.SimpleQueue()


class BufferPool:
    """Leases of pinned memory, of which never more than a budget is in use or kept for reuse.

    ``budget``: bytes; None for half of what the machine and the process's control groups have available now. A lease takes whole
    pages of 4096 bytes out of it, and up to an eighth more where memory of that size was free. Memory beyond RLIMIT_MEMLOCK
    serves as well, but the system may swap it out: a RuntimeWarning says so once, when it is pinned.

    Pinning takes about 0.3 s for each GB, so memory given back is kept for requests of about the same size, and unpinned when
    its room is needed for others, or by :meth:`trim`.

    Thread-safe. A process forked from this one must make its own: there every method raises RuntimeError, except that the leases
    it inherited can be released, which has no effect.
    """

    # Leases end anywhere, also in finalizers that the garbage collector runs in the midst of anything here. So an end takes no
    # lock: it is noted in _awaited and _ended, each in one step of the interpreter, and whoever waits is woken. All else is
    # changed with the lock held, by threads that want something; they begin with _settle, which asks the futures, and
    # _take_back.
    #
    # Ctrl-C may end any of this anywhere, and nothing stays in use by that. Whoever chooses a chunk has a claim before, which is
    # given up by any exception. The claim passes to the view by one assignment, when the lease is made; that the last tensor over
    # it has gone is noted by the interpreter itself, in a callback that is no Python code. Entries of _ended and _awaited go when
    # they have been dealt with, so that what was interrupted is done again.

    def __init__(self, budget: int | None = None) -> None:
        self._chunks = ChunkList(available_memory() // 2 if budget is None else _natural(budget, "budget"))
        self._generation = _generation
        self._lock = threading.Lock()
        self._awaited: dict[PinnedChunk, Ending] = {}  # of those lent
        self._ended: deque[Any] = deque()  # holders of chunks to be looked at: nothing awaited any more, or no view left
        self._waiting: tuple[_Waiter, ...] = ()  # first come first; replaced, never changed, since finalizers iterate over it

    @property
    def budget(self) -> int:
        """Bytes."""
        return self._chunks.budget

    def set_budget(self, nbytes: int) -> None:
        """Change the budget. Leases stay when it falls below what is in use: nothing new is leased until enough is given back."""
        nbytes = _natural(nbytes, "budget")
        self._settle()
        with self._lock:
            self._take_back()
            self._chunks.budget = nbytes
            self._chunks.unpin_down_to(nbytes)
        self._wake()

    @property
    def in_use(self) -> int:
        """Bytes that are leased, or seen by tensors over leases that have ended."""
        self._settle()
        with self._lock:
            self._take_back()
            return self._chunks.lent_bytes

    @property
    def allocated(self) -> int:
        """Bytes that are pinned, in use or kept for reuse: never more than the budget, except after that was lowered."""
        self._settle()
        with self._lock:
            self._take_back()
            return self._chunks.allocated

    def trim(self) -> None:
        """Unpin what is not in use."""
        self._settle()
        with self._lock:
            self._take_back()
            self._chunks.unpin_down_to(0)

    def lease(self, nbytes: int, timeout: float | None = None, keeping: Iterable[Lease] = ()) -> Lease:
        """``nbytes`` bytes of pinned memory, after waiting until there is room for them in the budget.

        First come, first served, except that where all that is in use belongs to threads that wait here, the first of them that
        can go on does. ``timeout``: seconds; None waits for as long as it takes. Ctrl-C interrupts the waiting.

        Raises TimeoutError, and OutOfBuffers at once where waiting cannot help: the budget is smaller than ``nbytes``; the system
        has not that much memory; or all that is in use was leased by this thread, or by others that wait here, and none of it is
        to be released after a future. (Tensors over leases that have ended are given a second to go.) Memory counts as leased by
        the thread that called ``lease``, whoever releases it: for another thread to do so, hand its future to ``release``. What
        was leased by a thread that has ended, any other may release: where none goes on, the error comes within a second.
        ``keeping``: leases that count as this thread's while it waits, because they will not be released before.
        """
        nbytes = _natural(nbytes, "nbytes")
        lease = self.try_lease(nbytes)
        return self._wait(nbytes, timeout, keeping) if lease is None else lease

    def try_lease(self, nbytes: int) -> Lease | None:
        """Like :meth:`lease`, but None where that would wait, or raise because of the budget. Pinning still takes its time."""
        nbytes = _natural(nbytes, "nbytes")
        self._settle()
        if nbytes == 0:
            return Lease(_no_bytes(), _forget)
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
                        waiter.left = True  # at once: a thread that has memory does not wait
                        self._queue()
                        break
                    if waiter.nbytes > self._chunks.budget:
                        raise OutOfBuffers(self._shortage(nbytes))
                    if following is None and self._stuck():
                        raise OutOfBuffers(self._shortage(nbytes, ", all held by this thread or by others that wait here"))
                    left = deadline - time.monotonic()
                    if left <= 0:
                        raise TimeoutError(self._shortage(nbytes, f", after waiting for {timeout} s"))
                    pause = min(left, _POLL_SECONDS if self._awaited else _LOOK_SECONDS)
                if following is not None:
                    following.wake.put(None)  # that this one waits may have made it that one's turn
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
        import torch

        if chunk.memory is None:
            chunk.memory = self._pin(chunk.nbytes)
        view = memoryview(chunk.memory)
        with torch.inference_mode(False):  # what is made in that mode cannot be written to outside of it
            buffer = torch.frombuffer(view, dtype=torch.uint8, count=nbytes)
        holder = Holder(view, self._ended.append)
        holder.chunk = chunk
        lease = Lease(buffer, functools.partial(self._give_back, chunk, holder), chunk)
        chunk.holder = holder  # in place of the claim; nothing is called from here on that could be interrupted
        return lease

    def _pin(self, nbytes: int) -> Any:
        try:
            return _op().empty_pinned(nbytes)
        except MemoryError:
            self.trim()
        try:
            return _op().empty_pinned(nbytes)
        except MemoryError as error:
            raise OutOfBuffers(f"the system has no {nbytes} bytes of memory to pin: free some of it, or want less") from error

    def _settle(self) -> None:
        """Ask what is awaited. Not with the lock held: who knows what futures do when they are asked."""
        if self._generation != _generation:
            raise RuntimeError("the buffer pool is the parent process's: use this process's buffer_pool(), or make another one")
        if self._awaited and self._ask():
            self._ask()  # some have let go of futures, which may have been what held tensors

    def _ask(self) -> bool:
        """Whether any future had ended."""
        ended = [(chunk, after) for chunk, after in self._awaited.copy().items() if _has_ended(chunk, after)]
        with self._lock:
            for chunk, after in ended:
                if self._awaited.get(chunk) is not after:
                    continue  # another thread was here, and the chunk may have gone round meanwhile
                if chunk.holder() is not None and not isinstance(after, _Lingering):
                    self._awaited[chunk] = _Lingering(chunk.holder)
                else:
                    self._ended.append(chunk.holder)
                    del self._awaited[chunk]
        return bool(ended)

    # Without the lock, from anywhere.

    def _give_back(self, chunk: PinnedChunk, holder: Callable[[], object], after: Ending | None) -> None:
        """A lease ends: ``after`` a future, and it has its memory still, or now, and the chunk may be another's already."""
        if after is not None:
            self._awaited[chunk] = after
        elif chunk.holder is holder and holder() is not None:
            self._awaited.setdefault(chunk, _Lingering(holder))
        self._wake()

    def _give_up(self, claim: Claim) -> None:
        claim.given_up = True
        self._ended.append(claim)
        self._wake()

    def _wake(self) -> None:
        for waiter in self._waiting:
            waiter.wake.put(None)

    # With the lock held.

    def _take_back(self) -> None:
        """Let what has ended be free."""
        while self._ended:
            holder = self._ended[0]
            chunk = getattr(holder, "chunk", None)  # it may have been given up before it had one
            if chunk in self._chunks.lent and chunk.holder is holder and holder() is None and chunk not in self._awaited:
                self._chunks.take_back(chunk)
            self._ended.popleft()  # otherwise it is still to end, or has before, and may have been lent again

    def _queue(self) -> tuple[_Waiter, ...]:
        if any(waiter.left for waiter in self._waiting):
            self._waiting = tuple(waiter for waiter in self._waiting if not waiter.left)
        return self._waiting

    def _stuck(self) -> bool:
        """Whether nobody can give anything back: all that is in use belongs to waiting threads, is held, and awaits nothing."""
        if self._awaited or not all(chunk.holder() for chunk in self._chunks.lent):
            return False
        waiting = {waiter.thread for waiter in self._queue()}
        kept = {chunk for waiter in self._queue() for chunk in waiter.kept}
        owners = {chunk.owner for chunk in self._chunks.lent if chunk not in kept} - waiting
        if any(owner is not None and owner.is_alive() for owner in owners):
            return False
        return not owners or waiting.issuperset(threading.enumerate())

    def _following(self) -> _Waiter | None:
        """Whose turn it is: the first one's, so that no large request starves; where nothing goes on, the first's that fits."""
        candidates = self._queue() if self._stuck() else self._queue()[:1]
        return next((waiter for waiter in candidates if self._chunks.fits(waiter.nbytes)), None)

    def _shortage(self, nbytes: int, circumstances: str = "") -> str:
        size, budget, in_use = padded(nbytes, PAGE), self._chunks.budget, self._chunks.lent_bytes
        enough = size if size > budget else size + in_use
        return (
            f"{nbytes} bytes of buffers are wanted; of the budget of {budget} bytes, {in_use} are in use"
            f"{circumstances}: set a budget of at least {enough} (deepnvme.swap.set_buffer_budget), "
            "or release leases and drop the tensors over them"
        )


def _op() -> ModuleType:
    from deepnvme.ops.op_builder import AsyncIOBuilder

    return AsyncIOBuilder().load()


def _natural(value: int, name: str) -> int:
    value = operator.index(value)
    if value < 0:
        raise ValueError(f"{name} must not be negative, got {value}")
    return value


def _forget(after: Ending | None) -> None:
    """Of a lease without memory there is nothing to give back."""


def _no_bytes() -> torch.Tensor:
    import torch

    return torch.empty(0, dtype=torch.uint8, device="cpu")


def _has_ended(chunk: PinnedChunk, after: Ending) -> bool:
    """Whether a future has. One that cannot say so has, too: the tensors of its transfer keep the memory for it."""
    try:
        if not after.done():
            return False
        if chunk.holder() is not None:
            after.exception()  # an engine lets go of a transfer's tensor when its future is asked
    except Exception:
        pass
    return True


_pool: BufferPool | None = None
_pool_lock = threading.Lock()
_generation = 0  # how many forks lie between this process and the one that imported this


def buffer_pool() -> BufferPool:
    """The process's pool, made on first use. A forked child has one of its own, empty, with its parent's budget."""
    global _pool
    with _pool_lock:
        if _pool is None:
            _pool = BufferPool()
        return _pool


def set_buffer_budget(nbytes: int) -> None:
    """Set the budget of the process's pool: see :meth:`BufferPool.set_budget`."""
    buffer_pool().set_budget(nbytes)


def _after_fork() -> None:
    global _pool, _pool_lock, _generation
    _generation += 1
    _pool_lock = threading.Lock()
    _pool = _pool and BufferPool(_pool.budget)


os.register_at_fork(after_in_child=_after_fork)
