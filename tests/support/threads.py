"""Whether a call into native code lets other threads run; and a process that can start none."""

from __future__ import annotations

import contextlib
import ctypes
import re
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

_STACK = 256 << 20
_LEFT = 32 << 20
"""Bytes of addresses: less than a stack, or an arena of the C library, and more than all else that a transfer allocates.

Staging for devices is 2 MiB, and takes 4 MiB to be aligned."""


@contextlib.contextmanager
def no_new_threads() -> Iterator[None]:
    """Have this process, an interpreter of its own, start no thread in this context: there is no room for its stack."""
    libc, attributes = ctypes.CDLL(None), ctypes.create_string_buffer(128)
    for failed in (
        libc.pthread_attr_init(attributes),
        libc.pthread_attr_setstacksize(attributes, ctypes.c_size_t(_STACK)),  # so no stack of an ended thread is large enough
        libc.pthread_setattr_default_np(attributes),
    ):
        assert not failed
    found = re.search(r"VmSize:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found is not None
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (int(found[1]) * 1024 + _LEFT, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


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
