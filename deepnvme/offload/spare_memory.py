"""Memory that is to spare during a step: for copies that would have to go to the drive otherwise."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable

from deepnvme.memory.host import private_mapping
from deepnvme.memory.lease import Lease
from deepnvme.memory.pool import BufferPool
from deepnvme.memory.system_memory import available_memory

_LOOK_BYTES = 64 << 20
"""After how many bytes to look again what memory the machine has left: other ranks take some too. A look takes 0.3 ms."""


class SpareMemory:
    """Lends at most half of the memory that is free, so that others get the other half.

    Free is what neither the pool's leases nor what it keeps for reuse nor the optimizer itself need of the pool's budget; and no
    more than the machine and the process's control groups have available.

    Between steps the kernel may take the memory, when a forward needs it, say (MADV_FREE). As long as it does not, the next step
    gets it without page faults: these took up to 1.2 s for 0.5 GB where a virtual machine gives free pages back to its host.

    Args:
        pool: Counts the memory in its budget while it is lent.
        needed: Returns how many more bytes of the budget the optimizer may lease in a step. Called once a step.
    """

    def __init__(self, pool: BufferPool, needed: Callable[[], int]) -> None:
        self._pool, self._needed = pool, needed
        self._lent: dict[Lease, mmap.mmap] = {}
        self._idle: dict[int, list[mmap.mmap]] = {}
        """What was lent in the last step, by size. The kernel may take it."""
        self.nbytes = 0
        """Bytes that are lent."""
        self._reserved: int | None = None
        self._available = 0
        self._since_look = 0

    def begin_step(self) -> None:
        """Look at the next :meth:`take` what is free."""
        self._reserved = None

    def take(self, nbytes: int) -> Lease | None:
        """Lend so many bytes, a multiple of the page size; return None if they are not to spare. Never waits.

        The lease's memory is to be given back by :meth:`take_back`.
        """
        if not self._is_free(nbytes):
            return None
        idle = self._idle.get(nbytes)
        try:
            memory = idle.pop() if idle else private_mapping(nbytes)
        except OSError:  # a limit of the process, such as RLIMIT_AS
            return None
        lease = self._pool.try_lease_over(memory)
        if lease is not None:
            self._lent[lease] = memory
            self.nbytes += nbytes
            self._since_look += nbytes
        return lease

    def take_back(self) -> None:
        """End all leases: a step has ended. No tensor over them may be in use."""
        idle: dict[int, list[mmap.mmap]] = {}
        for lease, memory in self._lent.items():
            lease.release()
            with contextlib.suppress(AttributeError, OSError):  # an older kernel, or the process has locked all its memory
                memory.madvise(mmap.MADV_FREE)
                idle.setdefault(len(memory), []).append(memory)
        self._lent, self._idle, self.nbytes = {}, idle, 0  # what this step has not used is unmapped

    def release(self) -> None:
        """End all leases, and unmap the memory."""
        self.take_back()
        self._idle = {}

    def _is_free(self, nbytes: int) -> bool:
        """Return whether, after lending so many more bytes, as much would be free as is lent."""
        if self._reserved is None:
            self._reserved = self._needed()
            self._available, self._since_look = available_memory() - self.nbytes, 0
        if self._since_look >= _LOOK_BYTES:
            # The kernel counts memory that it may take as available until it looks at it, even if it was written to again.
            self._available, self._since_look = min(self._available - self._since_look, available_memory()), 0
        free = min(self._pool.budget - self._pool.allocated - self._reserved, self._available - self._since_look)
        return self.nbytes + nbytes <= free - nbytes
