"""Pinned memory for transfers: leases from a pool that keeps to a budget."""

from __future__ import annotations

import bisect
import contextlib
import math
import operator
import os
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from deepnvme._available_memory import available_memory

if TYPE_CHECKING:
    import torch

_PAGE = 4096
_SLACK = 8
"""A free chunk serves a request that is smaller than it by up to an eighth of the request."""
_POLL_SECONDS = 0.001
"""How often a waiting thread asks futures whether they have ended: short beside any transfer worth waiting for."""


class Ending(Protocol):
    """What a lease can be released after: ``deepnvme.Future``, ``concurrent.futures.Future`` and the like.

    ``done()`` turns True without anybody waiting for it. ``exception()`` is asked only when it has, and only where the future
    still holds on to the memory.
    """

    def done(self) -> bool: ...

    def exception(self, timeout: float | None = None) -> BaseException | None: ...


class OutOfBuffers(MemoryError):
    """The budget does not allow a lease, and nothing that others do would change that."""


class _Chunk:
    """Pinned memory, as large as it was first asked for."""

    __slots__ = ("after", "memory", "nbytes", "owner", "returned", "view")

    def __init__(self, nbytes: int, owner: threading.Thread) -> None:
        self.nbytes = nbytes
        self.memory: Any = None
        """The op's buffer; None while it is being pinned."""
        self.owner = owner
        """The thread that leased it."""
        self.view: weakref.ref[memoryview] | None = None
        """Every tensor over the lease holds this memoryview; when it is gone, so are they."""
        self.after: Ending | None = None
        self.returned = 0.0
        """When it became free."""


class _Waiter:
    """A thread's place in the queue."""

    __slots__ = ("nbytes", "thread", "wake")

    def __init__(self, nbytes: int, thread: threading.Thread) -> None:
        self.nbytes = nbytes
        self.thread = thread
        # The one way to wake a thread that a finalizer may use: it can run within any other call, of this object too.
        self.wake: queue.SimpleQueue[None] = queue.SimpleQueue()


class Lease:
    """Pinned memory on loan; made by :meth:`BufferPool.lease`. A context manager, which releases it.

    The memory goes to somebody else once the lease is released or dropped *and* no tensor over it is alive: a view that was kept
    stays valid, and counts against the budget for as long.
    """

    __slots__ = ("__weakref__", "_buffer", "_chunk", "_pool", "nbytes")

    nbytes: int
    """As asked for."""

    def __init__(self, pool: BufferPool, chunk: _Chunk | None, buffer: torch.Tensor) -> None:
        self.nbytes = buffer.nbytes
        self._pool = pool
        self._chunk = chunk
        self._buffer: torch.Tensor | None = buffer

    @property
    def buffer(self) -> torch.Tensor:
        """``nbytes`` bytes (uint8, one dimension) from a 4096-byte boundary on, contents undefined. ValueError after release."""
        if self._buffer is None:
            raise ValueError(f"the lease of {self.nbytes} bytes was released: use its buffer before, or lease again")
        return self._buffer

    def tensor(self, shape: int | Sequence[int], dtype: torch.dtype, offset: int = 0) -> torch.Tensor:
        """A view of the buffer. ``offset``: bytes, a multiple of the dtype's size.

        Raises ValueError for another offset, for a tensor that ends past the buffer, and after release.
        """
        sizes = (operator.index(shape),) if not isinstance(shape, Sequence) else tuple(map(operator.index, shape))
        end = offset + math.prod(sizes) * dtype.itemsize
        if offset % dtype.itemsize or offset < 0:
            raise ValueError(f"offset must be a multiple of {dtype.itemsize} bytes, the size of {dtype}, got {offset}")
        if end > self.nbytes or any(size < 0 for size in sizes):
            raise ValueError(f"a tensor of {sizes} {dtype} at offset {offset} must fit in the lease of {self.nbytes} bytes")
        return self.buffer[offset:end].view(dtype).view(sizes)

    def release(self, after: Ending | None = None) -> None:
        """Give the memory back; ``after``: when that has ended, well or not. Never blocks. Idempotent: the first call counts."""
        if self._buffer is None:
            return
        if self._chunk is not None and after is not None:
            self._chunk.after = after
            self._pool._notice(self._chunk)
        self._buffer = None

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def __repr__(self) -> str:
        return f"<Lease of {self.nbytes} bytes{', released' if self._buffer is None else ''}>"


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

    # Leases end anywhere, also in finalizers that the garbage collector runs in the midst of anything here. So whatever ends only
    # appends to _inbox and wakes who waits; the rest is changed by threads that hold _lock, when they want something.

    def __init__(self, budget: int | None = None) -> None:
        self._budget = available_memory() // 2 if budget is None else _size(budget, "budget")
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._inbox: deque[_Chunk] = deque()
        self._lent: set[_Chunk] = set()
        self._lent_bytes = 0
        self._awaited: list[_Chunk] = []  # those of the lent whose future has not been seen to have ended
        self._free: list[_Chunk] = []  # smallest first; of equals, the last one used first, which may still be in a cache
        self._free_bytes = 0
        self._waiting: tuple[_Waiter, ...] = ()  # first come first; replaced, never changed: finalizers iterate over it

    @property
    def budget(self) -> int:
        """Bytes."""
        return self._budget

    def set_budget(self, nbytes: int) -> None:
        """Change the budget. Leases stay when it falls below what is in use: nothing new is leased until enough is given back."""
        nbytes = _size(nbytes, "budget")
        self._look()
        with self._lock:
            self._budget = nbytes
            self._unpin_down_to(nbytes)
        self._wake()

    @property
    def in_use(self) -> int:
        """Bytes that are leased, or seen through views of leases that have ended."""
        self._look()
        return self._lent_bytes

    @property
    def allocated(self) -> int:
        """Bytes that are pinned, in use or kept for reuse: never more than the budget, except after that was lowered."""
        self._look()
        with self._lock:
            return self._lent_bytes + self._free_bytes

    def trim(self) -> None:
        """Unpin what is not in use."""
        self._look()
        with self._lock:
            self._unpin_down_to(0)

    def lease(self, nbytes: int, timeout: float | None = None) -> Lease:
        """``nbytes`` bytes of pinned memory, after waiting until there is room for them in the budget.

        First come, first served, except that a request which those in front of it wait for goes before them. ``timeout``:
        seconds; None waits for as long as it takes. Ctrl-C interrupts the waiting.

        Raises TimeoutError, and OutOfBuffers at once where no waiting helps: the budget is smaller than ``nbytes``, the system
        has not that much memory, or all that is in use was leased by this thread, or by threads that wait here as well, and none
        of it awaits a future. A lease counts as the thread's that made it: hand it to another one with ``release(after=...)``.
        """
        nbytes = _size(nbytes, "nbytes")
        lease = self.try_lease(nbytes)
        return self._wait(nbytes, timeout) if lease is None else lease

    def try_lease(self, nbytes: int) -> Lease | None:
        """Like :meth:`lease`, but None where that would wait, or raise OutOfBuffers because of the budget."""
        nbytes = _size(nbytes, "nbytes")
        self._look()
        if nbytes == 0:
            import torch

            return Lease(self, None, torch.empty(0, dtype=torch.uint8))
        with self._lock:
            if self._waiting or not self._fits(_pages(nbytes)):
                return None
            chunk = self._take(_pages(nbytes))
        return self._lend(chunk, nbytes)

    def _wait(self, nbytes: int, timeout: float | None) -> Lease:
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        waiter = _Waiter(_pages(nbytes), threading.current_thread())
        with self._lock:
            self._waiting += (waiter,)
        try:
            while True:
                self._look()
                with self._lock:
                    if waiter.nbytes > self._budget:
                        raise OutOfBuffers(self._shortage(nbytes))
                    following = self._next()
                    if following is waiter:
                        chunk = self._take(waiter.nbytes)
                        break
                    if following is None and self._stuck():
                        reason = ", all of it by this thread's own leases and by threads that wait for some, too"
                        raise OutOfBuffers(self._shortage(nbytes, reason))
                    left = deadline - time.monotonic()
                    if left <= 0:
                        raise TimeoutError(self._shortage(nbytes, f", and nothing was given back within {timeout} s"))
                    pause = min(left, _POLL_SECONDS if self._awaited else threading.TIMEOUT_MAX)
                if following is not None:
                    following.wake.put(None)  # this one's waiting may have made it that one's turn
                with contextlib.suppress(queue.Empty):
                    waiter.wake.get(timeout=pause)
        finally:
            with self._lock:
                self._waiting = tuple(other for other in self._waiting if other is not waiter)
            self._wake()
        return self._lend(chunk, nbytes)

    # What follows up to _lend is called with the lock held.

    def _fits(self, nbytes: int) -> bool:
        return self._lent_bytes + nbytes <= self._budget

    def _stuck(self) -> bool:
        """Whether nobody can give anything back: every chunk in use is a waiting thread's, and awaits no future."""
        waiting = {waiter.thread for waiter in self._waiting}
        return not self._awaited and all(chunk.owner in waiting for chunk in self._lent)

    def _next(self) -> _Waiter | None:
        """Whose turn it is: the first one's, so that no large request starves; where that would stop all, the first that fits."""
        candidates = self._waiting if self._stuck() else self._waiting[:1]
        return next((waiter for waiter in candidates if self._fits(waiter.nbytes)), None)

    def _take(self, nbytes: int) -> _Chunk:
        """A chunk for a request that fits, not pinned yet where none could be reused."""
        at = bisect.bisect_left(self._free, nbytes, key=_nbytes)
        if at < len(self._free) and self._free[at].nbytes <= nbytes + nbytes // _SLACK:
            chunk = self._free.pop(at)
            self._free_bytes -= chunk.nbytes
            chunk.owner = threading.current_thread()
        else:
            self._unpin_down_to(self._budget - nbytes)
            chunk = _Chunk(nbytes, threading.current_thread())
        self._lent.add(chunk)
        self._lent_bytes += chunk.nbytes
        return chunk

    def _unpin_down_to(self, nbytes: int) -> None:
        """Unpin what has been free for longest, until no more than ``nbytes`` is allocated, or all that is left is in use."""
        while self._free and self._lent_bytes + self._free_bytes > nbytes:
            chunk = min(self._free, key=_returned)
            self._free.remove(chunk)
            self._free_bytes -= chunk.nbytes

    def _end(self, chunk: _Chunk) -> None:
        """Note what has become of a chunk that was heard of."""
        if chunk not in self._lent:
            return  # heard of twice
        if chunk.after is not None:
            if chunk not in self._awaited:
                self._awaited.append(chunk)
        elif chunk.view is None or chunk.view() is None:
            self._lent.remove(chunk)
            self._lent_bytes -= chunk.nbytes
            chunk.view = None
            if chunk.memory is not None:
                chunk.returned = time.monotonic()
                self._free.insert(bisect.bisect_left(self._free, chunk.nbytes, key=_nbytes), chunk)
                self._free_bytes += chunk.nbytes
                self._unpin_down_to(self._budget)

    def _shortage(self, nbytes: int, reason: str = "") -> str:
        wanted = max(self._lent_bytes + _pages(nbytes), self._budget)
        return (
            f"{nbytes} bytes of buffers are wanted, and of a budget of {self._budget} bytes {self._lent_bytes} are in use{reason}; "
            f"release leases and drop tensors over them, or set a budget of {wanted} bytes (deepnvme.swap.set_buffer_budget)"
        )

    # From here on without the lock.

    def _lend(self, chunk: _Chunk, nbytes: int) -> Lease:
        import torch

        try:
            if chunk.memory is None:
                chunk.memory = _pin(chunk.nbytes)
            view = memoryview(chunk.memory)
            buffer = torch.frombuffer(view, dtype=torch.uint8, count=nbytes)
            chunk.view = weakref.ref(view, lambda _: self._notice(chunk))
            return Lease(self, chunk, buffer)
        except BaseException:
            self._notice(chunk)
            raise

    def _look(self) -> None:
        """See which leases have ended."""
        if self._process != os.getpid():
            raise RuntimeError("the buffer pool is the parent process's: make one in this process, or use buffer_pool()")
        if not self._inbox and not self._awaited:
            return
        # Not with the lock held: who knows what futures do when they are asked.
        with self._lock:
            awaited = self._awaited.copy()
        ended = [chunk for chunk in awaited if _has_ended(chunk)]
        with self._lock:
            for chunk in ended:
                if chunk in self._awaited:
                    self._awaited.remove(chunk)
                    chunk.after = None
                    self._end(chunk)
            while self._inbox:
                self._end(self._inbox.popleft())

    def _notice(self, chunk: _Chunk) -> None:
        """Something about the chunk has changed. Called from finalizers too: takes no lock."""
        self._inbox.append(chunk)
        self._wake()

    def _wake(self) -> None:
        for waiter in self._waiting:
            waiter.wake.put(None)


def _size(nbytes: int, name: str) -> int:
    nbytes = operator.index(nbytes)
    if nbytes < 0:
        raise ValueError(f"{name} must not be negative, got {nbytes}")
    return nbytes


def _pages(nbytes: int) -> int:
    return -(-nbytes // _PAGE) * _PAGE


_nbytes = operator.attrgetter("nbytes")
_returned = operator.attrgetter("returned")


def _pin(nbytes: int) -> Any:
    from deepnvme.ops.op_builder import AsyncIOBuilder

    try:
        return AsyncIOBuilder().load().empty_pinned(nbytes)
    except MemoryError as error:
        raise OutOfBuffers(f"the system has no {nbytes} bytes of memory to pin; lower what else is in memory") from error


def _has_ended(chunk: _Chunk) -> bool:
    """Whether the chunk's future has. One that cannot say so has: its transfer's tensor keeps the memory while it lasts."""
    future = chunk.after
    if future is None:
        return True
    try:
        if not future.done():
            return False
        if chunk.view is not None and chunk.view() is not None:
            future.exception()  # an engine's lets go of the tensor when it is asked
    except Exception:
        pass
    return True


_pool: BufferPool | None = None
_pool_lock = threading.Lock()


def buffer_pool() -> BufferPool:
    """The process's pool, made on first use. A forked child has another one, with the default budget."""
    global _pool
    with _pool_lock:
        if _pool is None:
            _pool = BufferPool()
        return _pool


def set_buffer_budget(nbytes: int) -> None:
    """Set the budget of the process's pool: see :meth:`BufferPool.set_budget`."""
    buffer_pool().set_budget(nbytes)


def _forget_parent() -> None:
    global _pool, _pool_lock
    _pool, _pool_lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forget_parent)
