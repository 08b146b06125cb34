"""The job that ds_io measures, and its results, as data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from deepnvme.drives.aio_config import AioConfig

from .figures import Percentiles, Spread
from .folder import FolderFacts

Operation = Literal["read", "write"]
"""Direction of a transfer: from the drive or to it."""
OPERATIONS: tuple[Operation, ...] = get_args(Operation)
"""Both directions of a transfer."""
EngineName = Literal["aio_handle", "aio_basic", "torch_io", "torch_fastio"]
"""How the tensor is moved: by one handle, a handle for each call, torch.save and torch.load, or torch.save over a handle."""

PATHS = ("zero_copy", "staged", "buffered", "gds")
"""Names of the paths that bytes take between memory and drive: see :attr:`Sample.paths`."""


@dataclass(frozen=True)
class Place:
    """Folder and GPU of one process of a job."""

    folder: Path
    """The folder for its files."""
    device: int
    """Number of the GPU that holds its tensor, if the job uses GPUs."""


@dataclass(frozen=True)
class Job:
    """A transfer to be repeated and measured.

    In each loop the processes of all places move ``io_size`` bytes each, at the same time, to or from files of their own.
    """

    places: tuple[Place, ...]
    """Folder and GPU for each process. With a single place, no other process is started."""
    operation: Operation
    """Whether to read or to write."""
    io_size: int
    """Bytes of each process's tensor, an int."""
    setting: AioConfig
    """Settings of the handle."""
    engine: EngineName = "aio_handle"
    """How the tensor is moved."""
    loops: int = 3
    """Measured repetitions."""
    warmup_loops: int = 1
    """Repetitions before the measured ones."""
    include_warmup: bool = False
    """Whether to count the warm-up loops as well."""
    different_files: bool = False
    """Whether each loop has a new file; otherwise the first loop's file is overwritten, or read again."""
    fsync: bool = False
    """Whether writes are timed until they are on stable storage."""
    validate: bool = False
    """Whether to compare tensor and file after each loop, outside the measured time."""
    gpu: bool = False
    """Whether the tensors are in GPU memory; they then go through a pinned buffer, unless other options say otherwise."""
    slow_bounce_buffer: bool = False
    """With ``gpu``: whether the handle gets the GPU tensor itself, instead of a pinned copy in host memory."""
    accelerator_pin_memory: bool = False
    """Whether host memory is pinned by PyTorch instead of locked by the handle."""
    fast_io_size: int = 64 << 20
    """Bytes of the pinned buffer of torch_fastio, an int."""
    torch_legacy_save: bool = False
    """Whether torch.save uses the file format from before torch 1.6."""

    @property
    def total_loops(self) -> int:
        """Number of warm-up and measured loops."""
        return self.warmup_loops + self.loops

    @property
    def by_torch(self) -> bool:
        """Whether torch.save and torch.load move the tensor."""
        return self.engine.startswith("torch")


def file_name(operation: Operation, index: int, loop: int) -> str:
    """Return the name of the file that place number ``index`` uses in a loop; without ``different_files``, loop 0's is used."""
    return f"{operation}.{index}.{loop}"


@dataclass(frozen=True)
class Timing:
    """Bytes of a transfer, and the elapsed and CPU time that it took."""

    nbytes: int
    """Bytes moved."""
    seconds: float
    """Seconds until all bytes had been moved."""
    cpu_seconds: float
    """CPU seconds of all processes during the transfer, all threads included."""

    @property
    def gb_per_second(self) -> float:
        """Bandwidth in units of 10^9 bytes per second."""
        return self.nbytes / self.seconds / 1e9

    @property
    def cpu_seconds_per_gb(self) -> float:
        """CPU seconds spent for each 10^9 bytes that were moved."""
        return self.cpu_seconds / (self.nbytes / 1e9)


@dataclass(frozen=True)
class Sample(Timing):
    """The measured values of one loop, of one process or of all processes together."""

    requests: tuple[float, ...]
    """Seconds of the transfer of each process."""
    paths: Counter[str] | None
    """Bytes by their path between memory and drive; None if the engine does not count them.

    "zero_copy": past the page cache, from or into the tensor itself; "staged": past the page cache, but copied through an aligned
    buffer; "buffered": through the page cache; "gds": between drive and GPU memory, without host memory.
    """
    block_latency: Counter[float]
    """Latency histogram of I/O blocks: number of blocks by upper bound of the bin in seconds; empty if not counted."""

    @property
    def task_seconds(self) -> float:
        """Seconds of the transfer alone; with several processes, of the slowest one."""
        return max(self.requests)


@dataclass(frozen=True)
class Observation(Timing):
    """The measured values of one transfer."""

    block_latency_p99: float
    """99th percentile of the seconds from an I/O block's submission to its completion."""


@dataclass(frozen=True)
class Measurement:
    """The results of a job. Counted loops are those after the warm-up, or all loops with ``include_warmup``."""

    job: Job
    """The job that was measured."""
    folders: tuple[FolderFacts, ...]
    """Facts about the job's folders, each folder once."""
    backend: str | None
    """The backend that the first process used; None if the engine does not tell."""
    memory: str
    """Kind of memory that the tensors are in."""
    samples: tuple[Sample, ...]
    """Samples of the counted loops."""
    fallbacks: Mapping[str, int]
    """Reasons why transfers took a slower path, with the number of transfers for each."""

    @property
    def nbytes(self) -> int:
        """Bytes moved in all counted loops."""
        return sum(sample.nbytes for sample in self.samples)

    @property
    def gb_per_second(self) -> Spread:
        """10^9 bytes per second, over the counted loops."""
        return Spread.of([sample.gb_per_second for sample in self.samples])

    @property
    def cpu_seconds_per_gb(self) -> float:
        """CPU seconds per 10^9 bytes, over all counted loops."""
        return sum(sample.cpu_seconds for sample in self.samples) / (self.nbytes / 1e9)

    @property
    def task_seconds(self) -> float:
        """Seconds of all counted loops; with several processes, of the slowest one in each loop."""
        return sum(sample.task_seconds for sample in self.samples)

    @property
    def seconds(self) -> float:
        """Seconds of all counted loops, each until its last process was done."""
        return sum(sample.seconds for sample in self.samples)

    @property
    def request_latency(self) -> Percentiles:
        """Seconds from a request's start to its end; one request moves a whole tensor."""
        return Percentiles.of(Counter(seconds for sample in self.samples for seconds in sample.requests))

    @property
    def block_latency(self) -> Percentiles | None:
        """Seconds from an I/O block's submission to its completion; None if the engine does not count them."""
        bins = sum((sample.block_latency for sample in self.samples), Counter[float]())
        return Percentiles.of(bins) if bins else None

    @property
    def paths(self) -> Counter[str] | None:
        """Bytes of all counted loops by their path between memory and drive; None if the engine does not count them."""
        counted = [sample.paths for sample in self.samples if sample.paths is not None]
        return sum(counted, Counter[str]()) if counted else None
