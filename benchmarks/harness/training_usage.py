"""What training takes of memory and of the drive, as the kernel counts it for this process.

Standard library only: it runs in the interpreter of every contender.
"""

from __future__ import annotations

import ctypes
import gc
import threading

_SAMPLED_EVERY = 0.005  # seconds


class PeakMemory:
    """Samples the memory that this process has for itself and for pinned buffers, without what files are mapped."""

    def __init__(self) -> None:
        self._highest = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    @property
    def highest(self) -> int:
        """Bytes."""
        return max(self._highest, own_memory())

    def _sample(self) -> None:
        while not self._stop.wait(_SAMPLED_EVERY):
            self._highest = max(self._highest, own_memory())


def own_memory() -> int:
    """Bytes of RssAnon and RssShmem."""
    with open("/proc/self/status") as status:
        fields = dict(line.split(":", 1) for line in status)
    return sum(int(fields[name].split()[0]) * 1024 for name in ("RssAnon", "RssShmem"))


def return_freed_memory() -> None:
    """Have the kernel take back what is freed."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def transferred() -> tuple[int, int]:
    """Bytes that this process has had read from drives and written to them so far."""
    with open("/proc/self/io") as io:
        fields = dict(line.split(":", 1) for line in io)
    return int(fields["read_bytes"]), int(fields["write_bytes"])
