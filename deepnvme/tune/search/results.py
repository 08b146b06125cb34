"""The results of a search for the best settings, as data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from deepnvme.config import AioConfig
from deepnvme.tune.measure.folder import FolderFacts
from deepnvme.tune.measure.job import OPERATIONS, Operation

_Group = TypeVar("_Group")

TABLE = 10
"""Number of results that are shown. One round of the search measures that many, so that they can be compared."""


@dataclass(frozen=True)
class Figures:
    """The measured values of one direction with one setting."""

    gb_per_second: float
    """10^9 bytes per second."""
    cpu_seconds_per_gb: float
    """CPU seconds per 10^9 bytes."""
    latency_p50: float
    """Median of the seconds from a block's submission to its completion."""
    latency_p99: float
    """99th percentile of the same."""


@dataclass(frozen=True)
class Result:
    """The measured values of one setting."""

    setting: AioConfig
    """The setting."""
    backend: str
    """The backend that was used; ``setting.backend`` may be "auto"."""
    read: Figures | None
    """Values of reads; None if they were not asked for."""
    write: Figures | None
    """Values of writes; None if they were not asked for."""
    rounds: int
    """Rounds of the search in which the setting was measured: the more, the longer."""

    def figures(self, operation: Operation) -> Figures | None:
        """Return the values of one direction; None if it was not asked for."""
        return self.read if operation == "read" else self.write

    @property
    def operations(self) -> list[Operation]:
        """The directions that were measured, which have values."""
        return [operation for operation in OPERATIONS if self.figures(operation) is not None]


@dataclass(frozen=True)
class Search:
    """The results of a search on one folder, or on several at the same time.

    The names of the fields, in this order, are keys of ``ds_nvme_tune --json``.
    """

    folders: tuple[FolderFacts, ...]
    """The folders."""
    best: Result
    """The recommended one of the results."""
    reason: str
    """Why it is recommended, in one line."""
    rounds: int
    """Number of rounds."""
    seconds: float
    """Seconds that the search took."""
    complete: bool
    """False if the search was interrupted."""
    results: tuple[Result, ...]
    """Results of all settings, best first.

    Values of different rounds are comparable: a rate is what the setting gave relative to the best setting in the same round,
    times the best setting's rate in the last round.
    """

    def fastest(self, operation: Operation, group_of: Callable[[Result], _Group]) -> dict[_Group, float]:
        """Return the highest rate of one direction in each group of results, in 10^9 bytes per second.

        Args:
            operation: The direction; results without values of it are left out.
            group_of: Returns the group that a result belongs to.
        """
        rates: dict[_Group, float] = {}
        for result in self.results:
            figures, group = result.figures(operation), group_of(result)
            if figures is not None:
                rates[group] = max(rates.get(group, 0.0), figures.gb_per_second)
        return rates

    @property
    def table(self) -> tuple[Result, ...]:
        """The results to show: the ten best, and the recommended one if it is not among them."""
        shown = self.results[:TABLE]
        return shown if self.best in shown else (*shown, self.best)


@dataclass(frozen=True)
class Striping:
    """Speeds of several folders alone, each with its own best setting, and of all at the same time.

    Together they have the best setting for that, and bytes are distributed in proportion to their speeds. Rates are 10^9 bytes
    per second, of the operations that were asked for.
    """

    alone: tuple[tuple[str, Mapping[Operation, float]], ...]
    """Each folder with its rates."""
    together: Mapping[Operation, float]
    """Rates of all folders together."""
    shared_device: bool
    """Whether two of the folders are on one disk."""


@dataclass(frozen=True)
class Tuning:
    """The results of one run of the tuner: a search for each folder and, if there are several, one for all together.

    The names of the fields, in this order, are keys of ``ds_nvme_tune --json``.
    """

    io_size: int
    """Bytes of the file in each folder; no transfer is larger."""
    seconds: float
    """Seconds that the run took."""
    complete: bool
    """False if the run was interrupted, even if between two searches."""
    bytes_written: int
    """Bytes written to the drives."""
    searches: tuple[Search, ...]
    """The searches, the one for all folders together last."""
    striping: Striping | None
    """Comparison of the folders alone and together; None if there is only one, or the run was interrupted before."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Settings with which no handle could be made on this machine, and why."""

    @property
    def chosen(self) -> Search:
        """The search whose best setting is recommended: the last, for all folders together if there are several."""
        return self.searches[-1]
