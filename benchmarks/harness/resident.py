"""Resident memory of this process, now and at its highest. Runs in interpreters that have DeepSpeed and not this package."""

from __future__ import annotations


def resident(field: str) -> int:
    """``VmRSS``, or ``VmHWM``, its highest value since ``forget_peak``; bytes."""
    with open("/proc/self/status") as status:
        for line in status:
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    raise LookupError(field)


def forget_peak() -> bool:
    """Whether the kernel let it be forgotten."""
    try:
        with open("/proc/self/clear_refs", "w") as clear_refs:
            clear_refs.write("5")
        return True
    except OSError:
        return False
