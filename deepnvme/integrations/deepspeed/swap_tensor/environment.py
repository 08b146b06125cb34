"""What the swappers take from the program around them: which process this is, its timers, where to say what they are."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Iterator
from typing import Any

_logger = logging.getLogger(__name__)


def rank() -> int:
    """This process's among those of torch.distributed, 0 where that is not in use."""
    import torch.distributed as dist

    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def describe(subject: object, exclude: Collection[str] = ()) -> None:
    """Log the public attributes of ``subject``, but for those excluded, at level INFO, on rank 0."""
    if rank() == 0 and _logger.isEnabledFor(logging.INFO):
        settings = {name: value for name, value in sorted(vars(subject).items()) if name[0] != "_" and name not in exclude}
        _logger.info("%s: %s", type(subject).__name__, ", ".join(f"{name}={value}" for name, value in settings.items()))


class Timers:
    """DeepSpeed's timers, or none: ``timers(name)`` gives one with ``start`` and ``stop``, ``timers.log(names)`` logs them."""

    def __init__(self, timers: Callable[[str], Any] | None) -> None:
        self._timers = timers
        self.names: set[str] = set()
        """Those used since this was last cleared."""

    @contextlib.contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Time the body. The timer stops also if it raises: a retry could not start it otherwise."""
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
        """Have what was used logged."""
        if self._timers is not None and self.names:
            self._timers.log(sorted(self.names))  # type: ignore[attr-defined]
