"""How long tests wait for what has to come: only what hangs is later than that, however busy the machine is.

The limit of a whole test is ``timeout`` in pyproject.toml, which is longer, so that the test says what it waited for.
"""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE = 300.0
"""Seconds. A program of two ranks that takes 10 s by itself has taken 100 s at a load of 20 on two cores."""


def until(condition: Callable[[], object], what: str = "what the test waits for") -> None:
    """Wait until ``condition()`` is true. Blocks; an AssertionError that names ``what`` if that does not come about."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"{what} has not come about in {PATIENCE:.0f} s"
        time.sleep(0.002)
