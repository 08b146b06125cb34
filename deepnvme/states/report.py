"""What a step of an offloaded optimizer did, and what it waited for. ``CountedIO.report_step`` fills it in."""

from __future__ import annotations

from dataclasses import dataclass

from deepnvme.telemetry.descriptions import decimal_size
from deepnvme.telemetry.drive_wear import terabytes_per_day
from deepnvme.telemetry.report_figures import ReportFigures


@dataclass(frozen=True)
class StepReport(ReportFigures):
    """Timings and traffic of one step of an :class:`OffloadedOptimizer`. Seconds and bytes; 1 GB is 10^9 bytes.

    ``as_dict()`` has the numbers, for loggers.
    """

    step: int
    """Number of the step, from 1."""
    seconds: float
    """Time of the whole step, until ``step()`` returns; all times below lie within it.

    It begins with the call of ``step()``, the closure included. With ``step_in_backward`` or ``offload_gradients`` it begins with
    the first gradient of a backward, so it includes the rest of that backward and whatever else is computed until ``step()``."""
    computing: float
    """Time in the optimizer's own kernels, and for copying gradients and weights for them."""
    reading: float
    """Time with at least one read in flight, whether or not anything waited for it."""
    writing: float
    """Time with at least one write in flight, whether or not anything waited for it."""
    waiting: float
    """Time spent waiting for the drive with nothing to compute."""
    bytes_read: int
    """Bytes read of states, and of offloaded gradients."""
    bytes_written: int
    """Bytes written of states and of offloaded gradients.

    ``bytes_read`` and ``bytes_written`` do not include checkpoints and ``measure_limits``."""
    read_gb_per_second: float
    """``bytes_read`` over ``reading``. Writes at the same time take their share of the drive."""
    write_gb_per_second: float
    """``bytes_written`` over ``writing``. Reads at the same time take their share of the drive."""
    share_of_limit: float | None
    """The time that the drive would need for these bytes at its limits, first reading and then writing, over ``seconds``.

    None if the limits were not measured: see :meth:`OffloadedOptimizer.measure_limits`."""
    bytes_written_in_all: int
    """Bytes written since the optimizer was created, for any purpose: the wear of the drive."""
    resident_bytes: int
    """Bytes of states kept in memory by ``dram_budget``."""
    sub_groups: int
    """Number of sub-groups stepped in this step."""
    period: float
    """Time from the end of the step before to the end of this one, whatever was done in it; of the first step, ``seconds``."""

    @property
    def terabytes_per_day(self) -> float:
        """TB (10^12 bytes) that would be written in a day of steps like this one, each of which takes :attr:`period`."""
        return terabytes_per_day(self.bytes_written, self.period)

    def line(self) -> str:
        """Return the report as one line of text."""
        share = "" if self.share_of_limit is None else f", {self.share_of_limit:.0%} of the drive's limit"
        return (
            f"step {self.step}: {self.seconds:.3f} s, computing {self.computing:.3f}, waiting {self.waiting:.3f};"
            f" read {decimal_size(self.bytes_read)} at {self.read_gb_per_second:.2f} GB/s,"
            f" wrote {decimal_size(self.bytes_written)} at {self.write_gb_per_second:.2f} GB/s{share};"
            f" {decimal_size(self.bytes_written_in_all)} written in all, {self.terabytes_per_day:.2f} TB a day"
        )
