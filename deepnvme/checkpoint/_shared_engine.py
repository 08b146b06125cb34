"""The I/O engine that all saving and loading in this process uses."""

from __future__ import annotations

import functools
import os

from deepnvme.engine import Engine


def shared_engine() -> Engine:
    """Return this process's engine, created on first use. A forked child gets an engine of its own."""
    return _engine_of(os.getpid())


@functools.lru_cache(maxsize=1)
def _engine_of(process: int) -> Engine:
    return Engine()
