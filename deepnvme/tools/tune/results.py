"""The results of a search for the best settings, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from deepnvme.drives.aio_config import AioConfig

from .estimates import Difference
from .folder import FolderFacts
from .job import OPERATIONS, Operation

_TABLE = 10


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
    """99th percentile of the same. It grows with the length of the transfers, which differs between rounds."""


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
    """Rounds of the search in which the setting was measured. The figures are those of the last of them."""
    difference: Difference | None = None
    """How much longer it takes to move a byte in each direction than the recommended setting, which was measured in turn with it
    in the same round. None for the recommended setting itself."""

    def figures(self, operation: Operation) -> Figures | None:
        """Return the values of one direction; None if it was not asked for."""
        return self.read if operation == "read" else self.write

    @property
    def measured(self) -> dict[Operation, Figures]:
        """The values of the directions that were measured."""
        return {operation: found for operation in OPERATIONS if (found := self.figures(operation)) is not None}


@dataclass(frozen=True)
class RoundFacts:
    """What one round of a search measured."""

    settings: int
    """Number of settings."""
    passes: int
    """How many times each of them was measured in each direction."""
    nbytes: int
    """Bytes of each transfer."""


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
    """Why it is recommended and how sure that is, in one line."""
    rounds: int
    """Number of rounds."""
    seconds: float
    """Seconds that the search took."""
    complete: bool
    """False if the search was interrupted."""
    results: tuple[Result, ...]
    """Results of all settings: the finalists, fastest first, then the eliminated settings, latest first.

    Only results with the same number of rounds can be compared with each other: they were measured in turn, with transfers of the
    same length, and equally often. Each can be compared with the recommended one, by its ``difference``. The rates of an
    eliminated setting are what it gave relative to the recommended one in the same round, times the recommended one's rate in the
    final; they are as uncertain as its difference.
    """
    measured: tuple[RoundFacts, ...] = ()
    """What each round measured."""
    noise: float = 0.0
    """Median relative deviation of a transfer from what its setting usually takes."""
    shortened: bool = False
    """Whether the limit of bytes written ended a round before its time."""

    @property
    def finalists(self) -> tuple[Result, ...]:
        """The results of the final, among which the recommended one was chosen."""
        return tuple(result for result in self.results if result.rounds == self.best.rounds)

    @property
    def eliminated(self) -> tuple[Result, ...]:
        """The results of the settings that left before the final."""
        return tuple(result for result in self.results if result.rounds != self.best.rounds)

    @property
    def table(self) -> tuple[Result, ...]:
        """The results to show: the finalists, but no more than the ten fastest of them and the recommended one."""
        shown = self.finalists[:_TABLE]
        return shown if self.best in shown else (*shown, self.best)


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
    refused: Mapping[str, str] = field(default_factory=dict)
    """Settings with which no handle could be made on this machine, and why."""
    write_limit: int | None = None
    """The most bytes that the run was allowed to write; None if only the files were written, because only reads were measured."""

    @property
    def chosen(self) -> Search:
        """The search whose best setting is recommended: the last, for all folders together if there are several."""
        return self.searches[-1]
