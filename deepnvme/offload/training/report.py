"""Report of one step of a training: times, bytes, and what the step waited for."""

from __future__ import annotations

from dataclasses import dataclass

from deepnvme.offload.activations.report import ActivationReport
from deepnvme.states.report import DriveReport
from deepnvme.telemetry.drive_wear import terabytes_per_day


@dataclass(frozen=True, kw_only=True)
class TrainingReport(DriveReport):
    """Timings and traffic of one step of :class:`OffloadedTraining`. Seconds and bytes; 1 GB is 10^9 bytes.

    ``as_dict()`` has the numbers, for loggers; those of activations begin with ``activations_``.
    """

    waiting_to_write: float
    """The part of :attr:`waiting` spent on writes: those that free memory to read blocks into, and the last ones."""
    activations: ActivationReport | None
    """Report of the saved activations; None if all of them stay in memory."""

    @property
    def terabytes_per_day(self) -> float:
        """TB (10^12 bytes) written per day if every step is like this one and takes :attr:`period` seconds."""
        activations = 0 if self.activations is None else self.activations.bytes_written
        return terabytes_per_day(self.bytes_written + activations, self.period)

    def line(self) -> str:
        """Return the report as one line of text."""
        text = (
            f"step {self.step}: {self.seconds:.3f} s, waiting {self.waiting:.3f}, {self.waiting_to_write:.3f} of it to write;"
            f" read {self.bytes_read / 1e9:.3f} GB in {self.reading:.3f} s,"
            f" wrote {self.bytes_written / 1e9:.3f} GB in {self.writing:.3f} s; at most {self.peak_bytes / 1e9:.3f} GB in memory;"
            f" {self.terabytes_per_day:.2f} TB a day"
        )
        return text if self.activations is None else f"{text}; activations: {self.activations.line()}"
