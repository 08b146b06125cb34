"""Whether a call into native code lets other threads run."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable


def others_run_during(call: Callable[[], object]) -> bool:
    """Whether this thread runs in the middle half of the call, which another thread makes.

    Repeated: a machine that is busy may give this thread no turn in a short call, and a call that holds the lock never does.
    """
    return any(_runs_during(call) for _ in range(20))


def _runs_during(call: Callable[[], object]) -> bool:
    ends: list[float] = []

    def work() -> None:
        ends.append(time.perf_counter())
        call()
        ends.append(time.perf_counter())

    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # on its way into the call and out of it the thread may lose its turn, but not for long
    try:
        thread = threading.Thread(target=work)
        thread.start()
        moments = []
        while thread.is_alive():
            moments.append(time.perf_counter())
    finally:
        sys.setswitchinterval(usual)
    begin, end = ends
    quarter = (end - begin) / 4
    return any(begin + quarter < moment < end - quarter for moment in moments)
