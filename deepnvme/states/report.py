"""Report of one step of an offloaded optimizer. :mod:`deepnvme.offload.training.report` has the report of a training."""

from __future__ import annotations

from dataclasses import dataclass

from deepnvme.telemetry.descriptions import decimal_size
from deepnvme.telemetry.drive_wear import terabytes_per_day
from deepnvme.telemetry.report_figures import ReportFigures


@dataclass(frozen=True, kw_only=True)
class DriveReport(ReportFigures):
    """The section that the reports of optimizers and of trainings share. Seconds and bytes."""

    step: int
    """Number of the step, from 1."""
    seconds: float
    """Time of the whole step, until ``step()`` returns. All other times but :attr:`period` lie within it.

    A step of :class:`OffloadedOptimizer` begins with the call of ``step()``, the closure included. With
    ``offload_gradients`` it begins with the first gradient of a backward. A step of :class:`OffloadedTraining` begins with the
    first forward, and includes what is done between micro-batches."""
    reading: float
    """Time with at least one read of a block in flight, whether or not anything waited for it."""
    writing: float
    """Time with at least one write of a block in flight, whether or not anything waited for it."""
    waiting: float
    """Time spent waiting for the drive with nothing to compute: for blocks to be read, for memory to read them into, and for the
    last writes. Without the activations of a training."""
    bytes_read: int
    """Bytes of states and gradients, and with a training also of parameters, that were read. Without checkpoints."""
    bytes_written: int
    """Bytes of states and gradients, and with a training also of parameters, that were written. Without checkpoints."""
    peak_bytes: int
    """Most bytes of memory that were leased at a time since the step before, for states and gradients on their way to or from
    the drive or staying in memory, and with a training also for parameters. Without saved activations."""
    period: float
    """Time from the end of the step before to the end of this one, whatever was done in it; of the first step, ``seconds``."""

    def line(self) -> str:
        """Return the report as one line of text."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class StepReport(DriveReport):
    """Timings and traffic of one step of an :class:`OffloadedOptimizer`. Seconds and bytes; 1 GB is 10^9 bytes.

    ``as_dict()`` has the numbers, for loggers.
    """

    computing: float
    """Time in the optimizer's kernels, and for copying gradients and weights for those kernels."""
    bytes_written_in_all: int
    """Bytes written since the optimizer was created, for any purpose: they wear the drive."""
    resident_bytes: int
    """Bytes of states kept in memory by ``memory_budget``."""
    sub_groups: int
    """Number of sub-groups stepped in this step."""

    @property
    def read_gb_per_second(self) -> float:
        """``bytes_read`` over ``reading``, in GB/s. Concurrent writes take their share of the drive's speed."""
        return self.bytes_read / self.reading / 1e9 if self.reading else 0.0

    @property
    def write_gb_per_second(self) -> float:
        """``bytes_written`` over ``writing``, in GB/s. Concurrent reads take their share of the drive's speed."""
        return self.bytes_written / self.writing / 1e9 if self.writing else 0.0

    @property
    def terabytes_per_day(self) -> float:
        """TB (10^12 bytes) written per day if every step is like this one and takes :attr:`period` seconds."""
        return terabytes_per_day(self.bytes_written, self.period)

    def line(self) -> str:
        """Return the report as one line of text."""
        return (
            f"step {self.step}: {self.seconds:.3f} s, computing {self.computing:.3f}, waiting {self.waiting:.3f};"
            f" read {decimal_size(self.bytes_read)} at {self.read_gb_per_second:.2f} GB/s,"
            f" wrote {decimal_size(self.bytes_written)} at {self.write_gb_per_second:.2f} GB/s;"
            f" at most {decimal_size(self.peak_bytes)} in memory;"
            f" {decimal_size(self.bytes_written_in_all)} written in all, {self.terabytes_per_day:.2f} TB a day"
        )
