"""What ds_io is asked to measure, and what comes out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from deepnvme.config import AioConfig

from .figures import Percentiles, Spread, merged
from .folder import FolderFacts

Operation = Literal["read", "write"]
OPERATIONS: tuple[Operation, ...] = get_args(Operation)
EngineName = Literal["aio_handle", "aio_basic", "torch_io", "torch_fastio"]


@dataclass(frozen=True)
class Place:
    """Where one process works: a folder, and the number of the GPU that holds its tensor if one does."""

    folder: Path
    device: int


@dataclass(frozen=True)
class Job:
    """One transfer, repeated: each place's process moves ``io_size`` bytes to or from a file of its own, all at the same time."""

    places: tuple[Place, ...]
    operation: Operation
    io_size: int
    """Bytes."""
    setting: AioConfig
    engine: EngineName = "aio_handle"
    loops: int = 3
    warmup_loops: int = 1
    include_warmup: bool = False
    different_files: bool = False
    """A new file for each loop; else the first loop's file is overwritten, or read again."""
    fsync: bool = False
    """Time writes until they are on stable storage."""
    validate: bool = False
    """Compare tensor and file after each loop, outside the measured time."""
    gpu: bool = False
    slow_bounce_buffer: bool = False
    accelerator_pin_memory: bool = False
    fast_io_size: int = 64 << 20
    """Bytes of the pinned buffer of torch_fastio."""
    torch_legacy_save: bool = False
    compare_fio: bool = False

    @property
    def total_loops(self) -> int:
        return self.warmup_loops + self.loops


def file_name(operation: Operation, index: int, loop: int) -> str:
    """The file of the place of that index; without ``different_files``, loop 0's is that of all."""
    return f"{operation}.{index}.{loop}"


@dataclass(frozen=True)
class Paths:
    """Bytes by the way they took."""

    zero_copy: int
    """Past the page cache, from or into the tensor itself."""
    staged: int
    """Past the page cache, through an aligned buffer."""
    buffered: int
    """Through the page cache."""
    gds: int = 0
    """Between drive and GPU memory, without host memory."""

    def __add__(self, other: Paths) -> Paths:
        return Paths(
            self.zero_copy + other.zero_copy, self.staged + other.staged, self.buffered + other.buffered, self.gds + other.gds
        )


@dataclass(frozen=True)
class Sample:
    """One loop of one process, or of all of them together."""

    nbytes: int
    requests: tuple[float, ...]
    """Seconds that each process's transfer took."""
    seconds: float
    """Until the last process had ended."""
    cpu_seconds: float
    paths: Paths | None
    """None where the engine does not count."""
    block_latency: Mapping[int, int] | None
    """As ``Stats.block_latency``; None where the engine does not count."""

    @property
    def task_seconds(self) -> float:
        """The transfer alone; of several processes the slowest's."""
        return max(self.requests)

    @property
    def gb_per_second(self) -> float:
        """10^9 bytes per second."""
        return self.nbytes / self.seconds / 1e9

    @property
    def cpu_seconds_per_gb(self) -> float:
        return self.cpu_seconds / (self.nbytes / 1e9)


@dataclass(frozen=True)
class FioSample:
    """One loop as fio did it, by fio's own clocks."""

    nbytes: int
    seconds: float
    cpu_seconds: float
    block_latency_p50: float
    block_latency_p99: float

    @property
    def gb_per_second(self) -> float:
        return self.nbytes / self.seconds / 1e9


@dataclass(frozen=True)
class FioComparison:
    """fio on the same transfer, in turn with ours."""

    version: str
    ioengine: str
    buffers: str
    samples: tuple[FioSample, ...]
    ratio: Spread
    """Ours / fio's rate, loop by loop."""


@dataclass(frozen=True)
class Measurement:
    """What a job gave. Counted loops are those after the warm-up, or all with ``include_warmup``."""

    job: Job
    folders: tuple[FolderFacts, ...]
    backend: str | None
    memory: str
    """What kind of memory the tensors are in."""
    warmup: tuple[Sample, ...]
    samples: tuple[Sample, ...]
    """The counted loops."""
    fallbacks: Mapping[str, int]
    fio: FioComparison | None = None

    @property
    def nbytes(self) -> int:
        return sum(sample.nbytes for sample in self.samples)

    @property
    def task_seconds(self) -> float:
        """All counted loops; of several processes the slowest, loop by loop."""
        return sum(sample.task_seconds for sample in self.samples)

    @property
    def seconds(self) -> float:
        """All counted loops, each until its last process had ended."""
        return sum(sample.seconds for sample in self.samples)

    @property
    def gb_per_second(self) -> Spread:
        return Spread.of([sample.gb_per_second for sample in self.samples])

    @property
    def cpu_seconds_per_gb(self) -> float:
        return sum(sample.cpu_seconds for sample in self.samples) / (self.nbytes / 1e9)

    @property
    def request_latency(self) -> Percentiles:
        """From a request's start to its end: one request moves a whole tensor."""
        return Percentiles.of_seconds([seconds for sample in self.samples for seconds in sample.requests])

    @property
    def block_latency(self) -> Percentiles | None:
        """From a block's submission to its completion."""
        bins = merged(sample.block_latency or {} for sample in self.samples)
        return Percentiles.of_bins(bins) if bins else None

    @property
    def paths(self) -> Paths | None:
        counted = [sample.paths for sample in self.samples if sample.paths is not None]
        return sum(counted, Paths(0, 0, 0)) if counted else None
