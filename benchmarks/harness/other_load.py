"""How busy other processes kept the machine while a benchmark ran: its figures are worth less then."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

THRESHOLD = 0.25
"""Cores that others may use without a word. A desktop or a monitoring agent takes a tenth of one."""
_SHORTEST = 1.0
"""Seconds: the kernel counts in hundredths of one, which are too coarse for less."""
_TICKS = os.sysconf("SC_CLK_TCK")
_KTHREADD = 2
"""Process that all kernel threads are children of, where this process can see them."""


class OtherLoad:
    """Counts the processor time of other processes from when it is made. Its own are those it has started and waited for, too."""

    def __init__(self) -> None:
        self._begun = time.monotonic()
        self._before = _others()

    def cores(self) -> float:
        """Return the cores that other processes have used on average."""
        seconds = time.monotonic() - self._begun
        return max(0.0, _others() - self._before) / seconds if seconds > 0 else 0.0

    def warning(self) -> str:
        """Return a line about it; empty if others have used little, or it was too short to tell."""
        if time.monotonic() - self._begun < _SHORTEST or (cores := self.cores()) <= THRESHOLD:
            return ""
        return f"other processes used {cores:.1f} cores of this machine meanwhile: repeat it when they have ended"


def _others() -> float:
    """Return the seconds of processor time that processes have used since boot, without this one and its ended children."""
    names = ("user", "nice", "system")
    first = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    used = dict(zip(names, map(int, first), strict=False))
    kernel = _kernel_threads()
    # Kernel threads work for the benchmark: they write pages back and complete its transfers. Where they cannot be told from
    # processes, as in a container, system time is left out for everybody.
    ticks = used["user"] + used["nice"] + (0 if kernel is None else used["system"] - kernel)
    own = os.times()
    mine = own.user + own.children_user + (0.0 if kernel is None else own.system + own.children_system)
    return ticks / _TICKS - mine


def _kernel_threads() -> int | None:
    """Return the ticks that kernel threads have used, or None if they cannot be seen."""
    ticks, seen = 0, False
    for number in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # it has ended
            # The name, in parentheses, may hold anything.
            fields = Path("/proc", number, "stat").read_text().rpartition(")")[2].split()
            if int(fields[1]) == _KTHREADD:
                seen = True
                ticks += int(fields[11]) + int(fields[12])
    return ticks if seen else None
