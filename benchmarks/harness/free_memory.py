"""Free memory that is really there when a contender asks for it.

A virtual machine may report free memory to its host, which takes it away: by free page reporting of virtio-balloon or Hyper-V,
seconds after it was freed, and only what is free in blocks of 2 MiB. Touched again, it comes back at 0.2 to 0.5 GB/s here, where
memory that has stayed is cleared at 9. So what others freed before would decide a ratio, and huge pages would suffer first.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from deepnvme.memory.host import empty_aligned


class FreeMemory:
    """So many bytes that are held, touched, between turns, and free while one is taken."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._held: torch.Tensor | None = empty_aligned(nbytes)

    @contextlib.contextmanager
    def given(self) -> Iterator[None]:
        """Free until the end of the block, by which what was allocated in it has to be free again, the page cache's too."""
        self._held = None
        try:
            yield
        finally:
            self._held = empty_aligned(self._nbytes)
