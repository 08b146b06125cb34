"""What an optimizer moves between memory and the drive: how much, and for how long."""

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
    """Of one step. Seconds, and bytes."""

    begun: float | None = None
    """When the first was done for it, by ``time.perf_counter``."""
    computing: float = 0.0
    waiting: float = 0.0
    reading: float = 0.0
    writing: float = 0.0
    bytes_read: int = 0
    bytes_written: int = 0


class _Clock:
    """How long at least one transfer of a kind has been under way, as far as it was looked at."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._under_way: list[StoreFuture[Any]] = []
        self._since = 0.0

    def started(self, future: StoreFuture[Any]) -> None:
        """It is under way from now on."""
        self.look()
        if not self._under_way:
            self._since = time.perf_counter()
        self._under_way.append(future)

    def look(self) -> None:
        """Notice those that have ended."""
        if self._under_way:
            self._under_way = [future for future in self._under_way if not future.done()]
            if not self._under_way:
                self.seconds += time.perf_counter() - self._since


def _clocks() -> dict[str, _Clock]:
    return {"read": _Clock(), "write": _Clock()}


class _Spending:
    """No generator: one that Ctrl-C leaves suspended would add all the time until its end is collected."""

    def __init__(self, traffic: IOStats, what: Literal["computing", "waiting"]) -> None:
        self._traffic, self._what = traffic, what
        self._begun = 0.0

    def __enter__(self) -> None:
        self._begun = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        times = self._traffic.times
        setattr(times, self._what, getattr(times, self._what) + time.perf_counter() - self._begun)


class IOStats:
    """A store, with an account of what is read from it and written to it for the step that is being made."""

    def __init__(self, store: TensorStore) -> None:
        self.store = store
        self.times = StepTimes()
        self.written_in_all = 0
        """Bytes, steps that were undone included."""
        self._clocks = _clocks()

    def get(self, name: str, out: torch.Tensor) -> StoreFuture[torch.Tensor]:
        """As the store does."""
        future = self.store.get(name, out)
        self._clocks["read"].started(future)
        self.times.bytes_read += out.nbytes
        return future

    def put(self, name: str, tensor: torch.Tensor) -> StoreFuture[int]:
        """As the store does."""
        future = self.store.put(name, tensor)
        self._clocks["write"].started(future)
        self.times.bytes_written += tensor.nbytes
        self.written_in_all += tensor.nbytes
        return future

    def look(self) -> None:
        """Notice transfers that have ended: their time ends where somebody looks."""
        for clock in self._clocks.values():
            clock.look()

    def begin(self) -> None:
        """Something is done for a step. Only the first such call of a step counts."""
        if self.times.begun is None:
            self.times.begun = time.perf_counter()

    def spending(self, what: Literal["computing", "waiting"]) -> _Spending:
        """Add the time that the body of ``with`` takes."""
        return _Spending(self, what)

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """What is moved meanwhile is not for a step, but wears the drive all the same."""
        times, clocks = self.times, self._clocks
        self.times, self._clocks = StepTimes(), _clocks()
        try:
            yield
        finally:
            self.times, self._clocks = times, clocks

    def finish(self) -> StepTimes:
        """What has come together since this was last asked for: of a step, or of one that came to nothing."""
        self.look()
        times, self.times = self.times, StepTimes()
        times.reading, times.writing = self._clocks["read"].seconds, self._clocks["write"].seconds
        for clock in self._clocks.values():
            clock.seconds = 0.0
        return times
