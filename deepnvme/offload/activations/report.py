"""Report of one step of :class:`save_on_disk`: bytes saved, written and read, and times waited for the drive."""

from __future__ import annotations

import time
from dataclasses import dataclass

from deepnvme.telemetry.descriptions import decimal_size
from deepnvme.telemetry.drive_wear import terabytes_per_day
from deepnvme.telemetry.report_figures import ReportFigures
from deepnvme.telemetry.stopwatch import Stopwatch


@dataclass(frozen=True)
class ActivationReport(ReportFigures):
    """Bytes and times of one step of :class:`save_on_disk`: a forward, and the backward that followed it.

    ``as_dict()`` has the numbers, for loggers.
    """

    saved_bytes: int
    """Bytes of the storages that autograd saved, each counted once, without parameters and tensors below ``min_bytes``."""
    bytes_written: int
    """Bytes of all writes that were started."""
    bytes_read: int
    """Bytes read back. Less than ``bytes_written`` if tensors were still in memory, for any reason, when they were needed."""
    peak_bytes: int
    """Most bytes of saved tensors that were in memory at a time."""
    seconds: float
    """Time from the beginning of the step until a tensor was last saved, or asked for by the backward."""
    waiting_forward: float
    """Seconds that the forward waited for writes to make room."""
    waiting_backward: float
    """Seconds that the backward waited for reads."""

    @property
    def waiting(self) -> float:
        """Seconds that the computation waited for the drive."""
        return self.waiting_forward + self.waiting_backward

    @property
    def terabytes_per_day(self) -> float:
        """TB (10^12 bytes) that would be written in a day of such forwards and backwards, one after the other without a pause."""
        return terabytes_per_day(self.bytes_written, self.seconds)

    def line(self) -> str:
        """Return the report as one line of text. 1 GB is 10^9 bytes."""
        return (
            f"{decimal_size(self.saved_bytes)} saved, {decimal_size(self.bytes_written)} written,"
            f" {decimal_size(self.bytes_read)} read, at most {decimal_size(self.peak_bytes)} in memory;"
            f" {self.seconds:.3f} s, of which it waited {self.waiting_forward:.3f} s in the forward and"
            f" {self.waiting_backward:.3f} s in the backward"
        )


class StepCounts:
    """Counts the bytes and the waiting times of one step.

    Args:
        written: Bytes that the store had written before the step.
        read: Bytes that the store had read before the step.
    """

    def __init__(self, written: int = 0, read: int = 0) -> None:
        self.waiting_forward = Stopwatch()
        self.waiting_backward = Stopwatch()
        self._written, self._read = written, read
        self.saved_bytes = self._peak_bytes = 0
        self._begun = self._ended = time.perf_counter()

    def saved(self, nbytes: int, in_memory: int) -> None:
        """Count ``nbytes`` bytes that were saved, and record that ``in_memory`` bytes are in memory now."""
        self.saved_bytes += nbytes
        self.unpacked(in_memory)

    def unpacked(self, in_memory: int) -> None:
        """Record that a tensor was unpacked just now, and that ``in_memory`` bytes are in memory."""
        self._peak_bytes = max(self._peak_bytes, in_memory)
        self._ended = time.perf_counter()

    def report(self, written: int, read: int) -> ActivationReport:
        """Return the step's report, given the store's bytes written and read in total."""
        return ActivationReport(
            saved_bytes=self.saved_bytes,
            bytes_written=written - self._written,
            bytes_read=read - self._read,
            peak_bytes=self._peak_bytes,
            seconds=self._ended - self._begun,
            waiting_forward=self.waiting_forward.seconds,
            waiting_backward=self.waiting_backward.seconds,
        )
