"""Count the bytes that an optimizer moves between memory and drive in a step, and the time that it takes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch

    from deepnvme.store.futures import StoreFuture
    from deepnvme.store.tensor_store import TensorStore


@dataclass
class StepTimes:
    """Durations in seconds, and bytes moved, of one step."""

    begun: float | None = None
    """``time.perf_counter()`` when work for the step began; None before."""
    computing: float = 0.0
    waiting: float = 0.0
    reading: float = 0.0
    """Time with at least one read in flight."""
    writing: float = 0.0
    """Time with at least one write in flight."""
    bytes_read: int = 0
    bytes_written: int = 0


class _Clock:
    """Measures how long at least one transfer of a kind was in flight. Ends are only seen by :meth:`look`."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._under_way: list[StoreFuture[Any]] = []
        self._since = 0.0

    def started(self, future: StoreFuture[Any]) -> None:
        """Record the start of a transfer."""
        self.look()
        if not self._under_way:
            self._since = time.perf_counter()
        self._under_way.append(future)

    def look(self) -> None:
        """Record transfers that have ended."""
        if self._under_way:
            self._under_way = [future for future in self._under_way if not future.done()]
            if not self._under_way:
                self.seconds += time.perf_counter() - self._since


def _clocks() -> dict[str, _Clock]:
    return {"read": _Clock(), "write": _Clock()}


class _Spending:
    """Adds the time of a ``with`` body to ``computing`` or ``waiting``.

    Not a generator: if Ctrl-C left one suspended, it would add all the time until it is garbage-collected.
    """

    def __init__(self, traffic: IOStats, what: Literal["computing", "waiting"]) -> None:
        self._traffic, self._what = traffic, what
        self._begun = 0.0

    def __enter__(self) -> None:
        self._begun = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        times = self._traffic.times
        setattr(times, self._what, getattr(times, self._what) + time.perf_counter() - self._begun)


class IOStats:
    """Reads from and writes to a store, and counts bytes and times for the current step.

    Transfers through ``store`` directly are not counted.
    """

    def __init__(self, store: TensorStore) -> None:
        self.store = store
        self.times = StepTimes()
        self.written_in_all = 0
        """Bytes written since the optimizer was created, also for undone steps, checkpoints and measurements."""
        self._clocks = _clocks()

    def get(self, name: str, out: torch.Tensor) -> StoreFuture[torch.Tensor]:
        """Start reading the tensor ``name`` into ``out``, and count it. See :meth:`TensorStore.get`."""
        future = self.store.get(name, out)
        self._clocks["read"].started(future)
        self.times.bytes_read += out.nbytes
        return future

    def put(self, name: str, tensor: torch.Tensor) -> StoreFuture[int]:
        """Start writing ``tensor`` under ``name``, and count it. See :meth:`TensorStore.put`."""
        future = self.store.put(name, tensor)
        self._clocks["write"].started(future)
        self.times.bytes_written += tensor.nbytes
        self.written_in_all += tensor.nbytes
        return future

    def look(self) -> None:
        """Record transfers that have ended. Their time is counted until this is called, so call it whenever one has."""
        for clock in self._clocks.values():
            clock.look()

    def begin(self) -> None:
        """Record that work for a step begins. Only the first call in a step has an effect."""
        if self.times.begun is None:
            self.times.begun = time.perf_counter()

    def spending(self, what: Literal["computing", "waiting"]) -> _Spending:
        """Return a context manager that adds the time of its body to ``computing`` or ``waiting``."""
        return _Spending(self, what)

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Do not count transfers of the ``with`` body for a step. They do count for ``written_in_all``: they wear the drive."""
        times, clocks = self.times, self._clocks
        self.times, self._clocks = StepTimes(), _clocks()
        try:
            yield
        finally:
            self.times, self._clocks = times, clocks

    def finish(self) -> StepTimes:
        """Return bytes and times since the last call of this method, and start counting anew.

        Called when a step is completed, and when one was undone.
        """
        self.look()
        times, self.times = self.times, StepTimes()
        times.reading, times.writing = self._clocks["read"].seconds, self._clocks["write"].seconds
        for clock in self._clocks.values():
            clock.seconds = 0.0
        return times
