"""The swappers' access to the process's rank, the log and DeepSpeed's timers."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch.distributed as dist

from deepnvme.telemetry.descriptions import printable

_logger = logging.getLogger(__name__)


def rank() -> int:
    """Return this process's rank in torch.distributed; 0 if that is not initialized."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def describe(subject: object, exclude: Collection[str] = ()) -> None:
    """Log the public attributes of ``subject``, except for ``exclude``, at level INFO on rank 0."""
    if rank() == 0 and _logger.isEnabledFor(logging.INFO):
        settings = {name: value for name, value in sorted(vars(subject).items()) if name[0] != "_" and name not in exclude}
        text = ", ".join(f"{name}={value}" for name, value in settings.items())
        _logger.info("%s: %s", type(subject).__name__, printable(text))


class Timers:
    """Measures times with DeepSpeed's timers; does nothing if there are none.

    Args:
        timers: ``timers(name)`` returns a timer with ``start`` and ``stop``; ``timers.log(names)`` logs them. None to measure
            nothing.
    """

    def __init__(self, timers: Callable[[str], Any] | None) -> None:
        self._timers = timers
        self.names: set[str] = set()
        """Names of the timers used since the names were last cleared."""

    @contextlib.contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Time the ``with`` body. The timer is stopped even if the body raises, since a retry could not start it otherwise."""
        if self._timers is None:
            yield
            return
        timer = self._timers(name)
        timer.start()
        try:
            yield
        finally:
            timer.stop()
            self.names.add(name)

    def log(self) -> None:
        """Log all timers used since the list of used timers was last cleared."""
        if self._timers is not None and self.names:
            self._timers.log(sorted(self.names))  # type: ignore[attr-defined]
