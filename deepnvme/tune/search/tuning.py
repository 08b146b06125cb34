"""What a search for the best settings found out; nothing here measures or prints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from deepnvme.config import AioConfig
from deepnvme.tune.measure.folder import FolderFacts
from deepnvme.tune.measure.job import Operation

TABLE = 10
"""Results that are shown; the search measures so many in one round, so that they can be compared."""


@dataclass(frozen=True)
class Figures:
    """One direction with one setting."""

    gb_per_second: float
    """10^9 bytes per second."""
    cpu_seconds_per_gb: float
    latency_p50: float
    """Seconds from a block's submission to its completion."""
    latency_p99: float


@dataclass(frozen=True)
class Result:
    """What one setting gave. ``read`` or ``write`` is None where that direction was not asked for."""

    setting: AioConfig
    backend: str
    """The backend in use, which ``setting.backend`` may leave to ``auto``."""
    read: Figures | None
    write: Figures | None
    rounds: int
    """Rounds of the search it stayed in: the more, the longer it was measured."""

    def figures(self, operation: Operation) -> Figures | None:
        return self.read if operation == "read" else self.write


@dataclass(frozen=True)
class Search:
    """The settings tried on ``folders``, together if they are several."""

    folders: tuple[FolderFacts, ...]
    results: tuple[Result, ...]
    """Best first. Figures of all rounds are comparable: each is what its round gave relative to the best setting, times what
    that gave in the last round."""
    best: Result
    reason: str
    """Why this one, in a line."""
    rounds: int
    seconds: float
    complete: bool
    """False where it was interrupted."""

    @property
    def table(self) -> tuple[Result, ...]:
        """What is shown: the ten best, and the recommended one behind them if it is not among them."""
        shown = self.results[:TABLE]
        return shown if self.best in shown else (*shown, self.best)


@dataclass(frozen=True)
class Striping:
    """The same folders with their own best settings alone, and together with bytes dealt in proportion to their speeds.

    Rates are 10^9 bytes per second, of the operations that were asked for.
    """

    alone: tuple[tuple[str, Mapping[Operation, float]], ...]
    """Each folder, and its rates."""
    together: Mapping[Operation, float]
    shared_device: bool
    """Whether two of the folders lie on one device."""


@dataclass(frozen=True)
class Tuning:
    """One run of the tuner: a search for each folder alone and, where there are several, one for all of them together."""

    io_size: int
    """Bytes of the file in each folder; no transfer is larger."""
    searches: tuple[Search, ...]
    striping: Striping | None
    bytes_written: int
    seconds: float
    complete: bool
    """False where it was interrupted, be it between searches."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Settings that no handle could be made with here, and why."""

    @property
    def chosen(self) -> Search:
        """The search whose best setting is recommended: of all folders together where there are several."""
        return self.searches[-1]
