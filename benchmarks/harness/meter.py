"""What a transfer takes: time, processor time of all threads, and memory beyond the tensors.

Standard library only: it runs in the interpreter of every contender.
"""

from __future__ import annotations

import gc
import resource
import time
from collections.abc import Callable


def measure(transfer: Callable[[], None]) -> dict[str, float | int | None]:
    """The fields of a Sample, but for its bytes."""
    gc.collect()
    can_see_peak = forget_peak()
    resident = _resident("VmRSS")
    cpu, clock = _cpu_seconds(), time.perf_counter()
    transfer()
    seconds, cpu_seconds = time.perf_counter() - clock, _cpu_seconds() - cpu
    growth = max(0, peak() - resident) if can_see_peak else None
    return {"seconds": seconds, "cpu_seconds": cpu_seconds, "peak_growth": growth}


def peak() -> int:
    """Bytes of resident memory at its highest since this process began, or since :func:`forget_peak`."""
    return _resident("VmHWM")


def forget_peak() -> bool:
    """Whether the kernel lets it."""
    try:
        with open("/proc/self/clear_refs", "w") as clear_refs:
            clear_refs.write("5")
        return True
    except OSError:
        return False


def _resident(field: str) -> int:
    """A field of /proc/self/status, in bytes."""
    with open("/proc/self/status") as status:
        for line in status:
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    raise LookupError(field)


def _cpu_seconds() -> float:
    """CPU time of this process so far."""
    # All threads, the kernel's io_uring workers included: those belong to this process.
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
