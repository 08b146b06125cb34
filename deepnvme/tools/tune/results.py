"""The results of a search for the best settings, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from deepnvme.drives.aio_config import AioConfig

from .estimates import Difference
from .folder import FolderFacts
from .job import OPERATIONS, Operation


@dataclass(frozen=True)
class Figures:
    """The measured values of one direction with one setting."""

    gb_per_second: float
    """10^9 bytes per second."""
    cpu_seconds_per_gb: float
    """CPU seconds per 10^9 bytes."""
    latency_p99: float
    """99th percentile of the seconds from an I/O block's submission to its completion.

    It grows with the length of the transfers, which differs between rounds.
    """


@dataclass(frozen=True)
class Result:
    """What was measured with one setting."""

    setting: AioConfig
    """The setting."""
    backend: str
    """The backend that was used. ``setting.backend`` may be "auto"."""
    read: Figures | None
    """Values of reads; None if reads were not measured."""
    write: Figures | None
    """Values of writes; None if writes were not measured."""
    rounds: int
    """Number of rounds in which the setting was measured. ``read`` and ``write`` are from the last of them."""
    difference: Difference | None = None
    """How much longer the setting takes than the recommended one to move a byte in each direction.

    Both were measured in turn in the same round. None for the recommended setting itself.
    """

    @property
    def measured(self) -> dict[Operation, Figures]:
        """The values of the directions that were measured."""
        return {operation: found for operation in OPERATIONS if (found := getattr(self, operation)) is not None}


@dataclass(frozen=True)
class RoundFacts:
    """Size of one round of a search: its settings, passes and transfers."""

    settings: int
    """Number of settings in the round."""
    passes: int
    """How many times each setting was measured in each direction."""
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
    """Result of the recommended setting."""
    reason: str
    """Why the setting is recommended and how sure that is, in one line."""
    rounds: int
    """Number of rounds."""
    seconds: float
    """Seconds that the search took."""
    results: tuple[Result, ...]
    """Results of all settings: the finalists, fastest first, then eliminated settings, latest round first.

    Results can be compared with each other only if they have the same number of rounds: they were measured in turn, with
    transfers of the same length, and equally often. Every result can be compared with the recommended one, by its
    ``difference``. The rate of an eliminated setting is the recommended setting's rate in the final, times the ratio of both
    rates in the eliminated setting's last round. It is as uncertain as the setting's ``difference``.
    """
    measured: tuple[RoundFacts, ...] = ()
    """Facts about each round, in order."""
    noise: float = 0.0
    """Median relative deviation of a transfer from what its setting usually takes."""
    shortened: bool = False
    """Whether the limit of bytes written ended a round before its time."""

    @property
    def finalists(self) -> tuple[Result, ...]:
        """Results of the final, among which the recommended one was chosen."""
        return tuple(result for result in self.results if result.rounds == self.best.rounds)

    @property
    def eliminated(self) -> tuple[Result, ...]:
        """Results of the settings that were eliminated before the final."""
        return tuple(result for result in self.results if result.rounds != self.best.rounds)


@dataclass(frozen=True)
class Tuning:
    """The results of one run of the tuner: a search for each folder and, if there are several, one for all together.

    The names of the fields, in this order, are keys of ``ds_nvme_tune --json``.
    """

    io_size: int
    """Bytes of the file in each folder; no transfer is larger."""
    seconds: float
    """Seconds that the run took."""
    bytes_written: int
    """Bytes written to the drives."""
    searches: tuple[Search, ...]
    """The searches, the one for all folders together last."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Settings with which no handle could be made on this machine, and the reason for each."""
    write_limit: int | None = None
    """The most bytes that the run was allowed to write; None if only the files were written, because only reads were measured."""

    @property
    def chosen(self) -> Search:
        """The search whose best setting is recommended: the one for all folders together, or the only one."""
        return self.searches[-1]
