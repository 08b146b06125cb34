"""What is measured: the workloads, and the samples that come out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:  # at run time this serves processes that have another version of the package
    from deepnvme.tools.tune.job import Operation

Memory = Literal["pinned", "ordinary", "misaligned"]


@dataclass(frozen=True)
class Workload:
    """``files`` files with ``tensors`` tensors of ``nbytes`` bytes each, all started together and waited for once."""

    name: str
    operation: Operation
    state: Literal["existing", "preallocated", "absent"]
    files: int
    nbytes: int
    # fio's block size. Ours and DeepSpeed's handles keep their defaults.
    block_size: int
    tensors: int = 1

    @property
    def total_bytes(self) -> int:
        return self.files * self.tensors * self.nbytes


@dataclass(frozen=True)
class Sample:
    """One measurement. ``peak_growth``: bytes of resident memory the transfer added at its peak; None if unknown."""

    nbytes: int
    seconds: float
    cpu_seconds: float
    peak_growth: int | None

    @property
    def gb_per_second(self) -> float:
        return self.nbytes / self.seconds / 1e9

    @property
    def cpu_seconds_per_gb(self) -> float:
        return self.cpu_seconds / (self.nbytes / 1e9)


class ContenderFailed(Exception):
    """A contender could not do what was asked; the message is what it said."""


class Contender(Protocol):
    """Someone who carries out a workload and says what it took."""

    @property
    def name(self) -> str: ...
    @property
    def memory(self) -> str: ...

    def files(self, workload: Workload, directory: Path) -> Sequence[Path]:
        """The files the workload needs in ``directory``. Contenders that name the same files share them."""

    def measure(self, workload: Workload, paths: Sequence[Path]) -> Sample: ...

    def rehearse(self, workload: Workload, paths: Sequence[Path], contents: int) -> None:
        """Carry the workload out once, unmeasured, and raise ContenderFailed unless the right bytes arrived.

        ``contents``: seed of the pattern that existing files hold.
        """
