"""The engine that saving and loading share."""

from __future__ import annotations

import functools
import os

from deepnvme.engine import Engine


def shared_engine() -> Engine:
    """This process's; a forked child has one of its own."""
    return _engine_of(os.getpid())


@functools.lru_cache(maxsize=1)
def _engine_of(process: int) -> Engine:
    return Engine()
