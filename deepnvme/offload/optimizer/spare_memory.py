"""Memory that is to spare during a step: for copies that would have to go to the drive otherwise."""

from __future__ import annotations

import functools
import mmap
import threading
import weakref
from collections.abc import Callable
from typing import Protocol

import torch

from deepnvme._interrupts import defer_interrupts
from deepnvme.memory.host import private_mapping
from deepnvme.memory.lease import Lease, Transfer
from deepnvme.memory.pool import BufferPool
from deepnvme.memory.system_memory import available_memory

_LOOK_BYTES = 64 << 20
"""After how many bytes to look again what memory the machine has left: other ranks take some too. A look takes 0.3 ms."""


class Write(Protocol):
    """Starts a write to the drive. Thread-safe."""

    def __call__(self, name: str, tensor: torch.Tensor) -> Transfer:
        """Return the write. Raises OSError if it cannot be started."""


class SpareCopy:
    """Bytes in spare memory. They go to the drive if somebody else wants the memory. Made by :meth:`SpareMemory.copy`."""

    def __init__(self, name: str, memory: mmap.mmap, lock: threading.RLock) -> None:
        self._lock = lock
        self.name = name
        """The store's name for the bytes, if they go to the drive."""
        self.nbytes = len(memory)
        self.lease: Lease | None = None
        """None before it is made, and when the bytes are on the drive."""
        self.memory: mmap.mmap | None = memory
        """None when the bytes are on the drive."""
        self.filled = False

    @property
    def buffer(self) -> torch.Tensor | None:
        """The bytes; None if they are on the drive. As long as the tensor is kept, the memory stays as it is."""
        with self._lock:  # it may be about to go to the drive
            return None if self.lease is None else self.lease.buffer


class SpareMemory:
    """Lends at most half of the memory that is free, and gets it back for anybody who would wait for it.

    Free is what neither the pool's leases nor what it keeps for reuse nor the optimizer itself need of the pool's budget; and no
    more than the machine and the process's control groups have available.

    When a request to the pool would have to wait, or to be refused, copies are written to the drive until there is room for it.
    The thread does so whose request it is.

    Between steps the kernel may take the memory, when a forward needs it, say (MADV_FREE). As long as it does not, the next step
    gets it without page faults: these took up to 1.2 s for 0.5 GB where a virtual machine gives free pages back to its host.

    All methods but :meth:`give_way` are to be called by one thread at a time.

    Args:
        pool: Counts the memory in its budget while it is lent.
        needed: Returns how many more bytes of the budget the optimizer may lease in a step. Called once a step.
        write: Writes a copy whose memory somebody else wants.
    """

    def __init__(self, pool: BufferPool, needed: Callable[[], int], write: Write) -> None:
        self._pool, self._needed, self._write = pool, needed, write
        # Held while a copy is made, and while one goes to the drive, so that none does half made or twice. The pool calls
        # give_way() without its own lock, and nobody who holds this one waits for the pool.
        self._lock = threading.RLock()
        self._lent: list[SpareCopy] = []
        self._idle: dict[int, list[mmap.mmap]] = {}
        """What was lent in the last step, by size. The kernel may take it."""
        self._written = 0
        self._reserved: int | None = None
        self._available = 0
        self._since_look = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the copies that are in memory now. Those that went to the drive do not count."""
        return sum(copy.nbytes for copy in tuple(self._lent) if copy.lease is not None)

    def begin_step(self) -> None:
        """Have the next :meth:`copy` ask again how much memory the step needs and the machine has left."""
        self._reserved = None

    def copy(self, name: str, nbytes: int, fill: Callable[[torch.Tensor], None]) -> SpareCopy | None:
        """Make a copy, which stays until :meth:`take_back`. Never waits for the pool.

        Args:
            name: The store's name for the copy, if it goes to the drive. Its space should be reserved.
            nbytes: Bytes of the copy, a multiple of the page size.
            fill: Fills the memory.

        Returns:
            The copy, or None if the memory for it is not to spare.
        """
        with self._lock:
            if not self._is_free(nbytes):
                return None
            idle = self._idle.get(nbytes)
            try:
                memory = idle.pop() if idle else private_mapping(nbytes)
            except OSError:  # a limit of the process, such as RLIMIT_AS
                return None
            copy = SpareCopy(name, memory, self._lock)
            give_way = functools.partial(_give_way, weakref.ref(self), weakref.ref(copy))
            copy.lease = self._pool.try_lease_over(memory, give_way)
            if copy.lease is None:
                return None
            self._lent.append(copy)
            self._since_look += nbytes
            fill(copy.lease.buffer)
            copy.filled = True
            return copy

    def take_back(self) -> None:
        """End all leases: a step has ended. No tensor over them may be in use."""
        with self._lock:
            idle: dict[int, list[mmap.mmap]] = {}
            for copy in self._lent:
                lease, copy.lease = copy.lease, None
                if lease is not None and copy.memory is not None:
                    lease.release()
                    try:
                        copy.memory.madvise(mmap.MADV_FREE)
                    except (AttributeError, OSError):  # an older kernel, or the process has locked all its memory
                        continue
                    idle.setdefault(copy.nbytes, []).append(copy.memory)
            self._lent, self._idle = [], idle  # what this step has not used is unmapped

    def release(self) -> None:
        """End all leases, and unmap the memory."""
        self.take_back()
        self._idle = {}

    def pop_written(self) -> int:
        """Return how many bytes of copies were written to the drive since the last call."""
        with self._lock:
            written, self._written = self._written, 0
        return written

    def give_way(self, copy: SpareCopy) -> None:
        """Write a copy to the drive, and end the lease of its memory. If it cannot be written it stays in memory.

        Blocks until it is written. Can be called by any thread.
        """
        with self._lock:
            if copy.lease is None or not copy.filled:
                return
            # An error is not raised: it is none of whoever wants the memory, who then waits or is told that there is none.
            try:
                if self._write(copy.name, copy.lease.buffer).exception() is not None:
                    return
            except Exception:
                return
            self._written += copy.nbytes
            lease, copy.lease = copy.lease, None
            copy.memory = None  # unmapped before the pool counts it as free, unless somebody has a tensor over it
            lease.release()
            self._lent.remove(copy)

    def _is_free(self, nbytes: int) -> bool:
        """Return whether, after lending so many more bytes, as much would be free as is lent."""
        lent = self.nbytes
        if self._reserved is None or self._since_look >= _LOOK_BYTES:
            with defer_interrupts():  # Ctrl-C would leave files of /proc open
                self._look(lent)
        assert self._reserved is not None
        free = min(self._pool.budget - self._pool.allocated - self._reserved, self._available - self._since_look)
        return lent + nbytes <= free - nbytes

    def _look(self, lent: int) -> None:
        """Find out how much memory the machine has left, and how much of the pool's budget the optimizer itself needs."""
        if self._reserved is None:
            self._reserved = self._needed()
            self._available, self._since_look = available_memory() - lent, 0
        else:
            # The kernel counts memory that it may take as available until it looks at it, even if it was written to again.
            self._available, self._since_look = min(self._available - self._since_look, available_memory()), 0


def _give_way(spare: weakref.ref[SpareMemory], copy: weakref.ref[SpareCopy]) -> None:
    """Have a copy give way. The pool keeps neither alive: an optimizer that is dropped within a step gives back all memory."""
    lender, lent = spare(), copy()
    if lender is not None and lent is not None:
        lender.give_way(lent)
